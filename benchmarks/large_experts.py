"""A large model with experts, compiled and run in a process of its own: time and memory of every phase.

    python benchmarks/large_experts.py --layers 4 --json rows.json

The model is Qwen3-30B-A3B's but for its layers, with random weights in compressed-tensors' W4A16, written to a
temporary folder (0.36 GB per layer, and 1.2 GB of embedding and head) and thrown away. Prints a row for each phase
{phase, seconds, peak_mb, resident_mb}: the process's largest and its last resident memory. Pages of files that are
mapped count too. The peak of a phase is its own where Linux lets it start anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import halfbyte
from halfbyte.compile_model import compile_model
from halfbyte.progress import Progress
from halfbyte.runtime import Conversation

ROOT = Path(__file__).parents[1]


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class _Rows(Progress):
    def __init__(self) -> None:
        self.current: str | None = None
        self.start = time.perf_counter()

    def phase(self, name: str) -> None:
        self.end()
        self.current, self.start = name, time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew

    def end(self) -> None:
        if self.current is not None:
            seconds = time.perf_counter() - self.start
            row: dict[str, Any] = dict(phase=self.current, seconds=round(seconds, 2))
            print(
                json.dumps(row | dict(peak_mb=round(_memory("VmHWM")), resident_mb=round(_memory("VmRSS"))))
            )
            sys.stdout.flush()
        self.current = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.phase(name)
        yield
        self.end()


def compile_it(folder: Path, out: Path, options: argparse.Namespace) -> None:
    rows = _Rows()
    with rows("inspect"):
        halfbyte.inspect(folder)
    chosen = halfbyte.CompileOptions(
        max_context=options.context, dtype=options.dtype, activations=options.activations
    )
    compile_model(folder, out, chosen, rows)
    rows.end()


def generate(out: Path, options: argparse.Namespace) -> None:
    rows = _Rows()
    with rows("open the bundle"):
        bundle = halfbyte.load(out, threads=options.threads)
        conversation = Conversation(bundle)
    for length in (256, 16):
        with rows(f"prefill {length} tokens"):
            conversation = Conversation(bundle)
            logits = conversation.prefill([token % 1000 for token in range(length)])
    with rows("32 tokens, one by one"):
        for _ in range(32):
            logits = conversation.step(int(logits.argmax()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--do", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        what, folder, out = options.do
        if what == "compile":
            compile_it(Path(folder), Path(out), options)
        else:
            generate(Path(out), options)
        return
    sys.path.insert(0, str(ROOT / "tests" / "checkpoints"))
    from made_large_experts import LargeModel, write_large_experts

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch) / "model", Path(scratch) / "out"
        write_large_experts(folder, LargeModel(options.layers))
        for what in ("compile", "generate"):
            again = [sys.executable, __file__, *sys.argv[1:], "--do", what, str(folder), str(out)]
            done = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout, end="")
            rows += [json.loads(line) for line in done.stdout.splitlines()]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
