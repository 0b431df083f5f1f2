"""The whole way, on a real model: inspect, compile, generate, run with IREE's own tool, compare, measure.

Every step prints the command it runs. With .venv/bin on the PATH they can be copied.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from fetch_model import FOLDER, MODEL

TOOLS = Path(sys.executable).parent
BUNDLE = FOLDER / "bundle"
TOKENS = "1,504,3575,282,4649,314,260,1234"
LONG_PROMPT = (
    "A compiler reads a program in one language and writes it in another. The first compilers turned formulas "
    "into the instructions of one machine, and people doubted that they could ever match what a careful "
    "programmer wrote by hand. They were wrong within a few years. Today a compiler knows more about the machine "
    "than most of the people who use it: how wide its vectors are, how long a load takes, and what can go on "
    "meanwhile. For a neural network the question is much the same as it was for formulas, and"
)


@dataclass
class Done:
    """A finished command.

    Attributes:
        out: what it wrote to stdout.
        err: what it wrote to stderr, where that was kept.
        peak: bytes of memory that it and its children held at most at one time, to the sampling's precision.
    """

    out: str
    err: str
    peak: int


def step(title: str, *command: str, folder: Path = Path(), show: bool = True, keep_err: bool = False) -> Done:
    """Prints and runs a command; ends the demo if it fails."""
    print(
        f"\n== {title}\n$ {f'cd {folder} && ' if folder != Path() else ''}{shlex.join(command)}", flush=True
    )
    environment = dict(os.environ, PATH=f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}")
    process = subprocess.Popen(
        [str(TOOLS.resolve() / command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if keep_err else None,
        text=True,
    )
    peak = _Peak(process.pid)
    out, err = process.communicate()
    peak.stop()
    if show:
        print(out, end="")
    print(err or "", end="", file=sys.stderr, flush=True)
    if process.returncode:
        sys.exit(f"the command failed with exit code {process.returncode}")
    return Done(out, err or "", peak.bytes)


class _Peak:
    """Watches the resident memory of a process and all its descendants; Linux only, 0 elsewhere."""

    def __init__(self, pid: int) -> None:
        self.bytes, self._pid, self._ended = 0, pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.bytes = max(self.bytes, _resident(self._pid), _highest(self._pid))

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def _resident(pid: int) -> int:
    process = Path("/proc") / str(pid)
    try:
        pages = int((process / "statm").read_text().split()[1])
        children = [
            child
            for task in (process / "task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(child)) for child in children)


def _highest(pid: int) -> int:
    """The most one process ever held, which no sampling can miss."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", (Path("/proc") / str(pid) / "status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def rate(text: str, phase: str) -> str:
    found = re.search(phase + r": (\d+) tokens, ([\d.]+) tokens/s", text)
    return f"{found[2]} tokens/s ({found[1]} tokens)" if found else "not reported"


def megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", default="host", help="as for halfbyte compile")
    cpu = parser.parse_args().cpu
    model, bundle = str(MODEL), str(BUNDLE)

    step("What the checkpoint holds, from its headers", "halfbyte", "inspect", model)

    options = ["--activations", "none", "--max-context", "512", "--cpu", cpu, "--no-cache"]
    compiled = step("Compile", "halfbyte", "compile", model, "-o", bundle, *options)

    chat = ["--chat", "-p", "Name three primary colors."]
    step("Generate", "halfbyte", "generate", bundle, *chat)

    measured = step(
        "Speed, with a longer prompt",
        *("halfbyte", "generate", bundle, "-p", LONG_PROMPT, "--max-tokens", "64", "--no-stream"),
        keep_err=True,
    )

    logits = FOLDER / "logits.npy"
    step("Logits by halfbyte's runtime", "halfbyte", "logits", bundle, "--tokens", TOKENS, "-o", str(logits))
    count = TOKENS.count(",") + 1
    step(
        "The same by IREE's own tool",
        *("iree-run-module", "--flagfile=forward.flags", f"--input={count}xi64={TOKENS}"),
        "--output=@../logits-iree.npy",
        folder=BUNDLE,
    )
    same = logits.read_bytes() == (FOLDER / "logits-iree.npy").read_bytes()
    print("the two files are equal" if same else "THE TWO FILES DIFFER")

    start = time.perf_counter()
    verify = step(
        "Compare with the float model, and every layer with its reference",
        *("halfbyte", "verify", bundle, model, "--tokens", TOKENS, "--json"),
        show=False,
    )
    found = json.loads(verify.out)
    layers = found["layers"]
    print(f"{len(layers)} layers compared in {time.perf_counter() - start:.0f} s")

    seconds = json.loads((BUNDLE / "report.json").read_text())["seconds"]
    exact = sum(layer["equal"] for layer in layers)
    rows = {
        "checkpoint": megabytes(MODEL),
        "program (.vmfb)": megabytes(BUNDLE / "model.cpu.vmfb"),
        "parameters (.irpa)": megabytes(next(BUNDLE.glob("*.irpa"))),
        "compile": f"{sum(seconds.values()):.0f} s ({', '.join(f'{k} {v:.0f}' for k, v in seconds.items() if v >= 1)})",
        "memory while compiling": f"{compiled.peak / 1e9:.2f} GB" if compiled.peak else "not measured here",
        "prompt": rate(measured.err, "prompt"),
        "decode": rate(measured.err, "decode"),
        "layers equal to the reference": f"{exact} of {len(layers)}, bit for bit",
        "logits against the float model": f"error {found['logits_error']:.1e} of the largest, KL {found['kl']:.1e}",
        "most likely token": f"the float model's at {100 * found['agreement']:.0f} % of {found['tokens']} positions",
        "iree-run-module": "equal to halfbyte's runtime, bit for bit" if same else "DIFFERS",
    }
    width = max(map(len, rows))
    print(f"\n== {MODEL.name}, {os.cpu_count()} CPU cores")
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
