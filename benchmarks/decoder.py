"""A whole decoder: tokens per second of halfbyte, llama.cpp and transformers, alternating in one run.

    python benchmarks/decoder.py [--model FILE.gguf] [--threads 1] [--tests pp512,tg64,tg64@1024] [--json FILE]

The model is SmolLM2-135M-Instruct (Q4_1) that `make demo` fetches, if nothing else is given. Every engine is a process
of its own, of which one is awake at a time; a round measures each test once with every engine, and medians of the
rounds are printed. ppN is a prompt of N tokens at once, tgN are N tokens one by one, @D behind D others. One thread is
timed by its CPU time, more by the clock. Engines (decoder_engines.py says what each needs):

    halfbyte        W4A16, the head kept: the tokens of the float model
    halfbyte_int8   int8 activations, the head rounded to int8; caches in float32
    halfbyte_int8_bf16   the same with caches in 16 bits, as llama.cpp and torch_bf16 have them
    llama           llama.cpp with the file as it is
    llama_q4_0      llama.cpp with the file in Q4_0, its fastest
    torch_bf16, torch_f32   transformers
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from decoder_engines import ENGINES, parse_test, serve
from interleave import Worker

_DEFAULT = Path("build/demo/SmolLM2-135M-Instruct.Q4_1.gguf")


def measure(
    model: Path, threads: int, tests: list[str], engines: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Rows with peer, test, threads, tok_s (the median) and best; an engine that cannot run has none and says why."""
    rates: dict[tuple[str, str], list[float]] = {}
    workers = []
    for name in engines:
        worker = Worker("decoder.py", name, threads)
        said = worker.ask(
            model=str(model.resolve()), threads=threads, context=max(sum(parse_test(t)) for t in tests) + 1
        )
        if "error" in said:
            print(f"{name}: left out: {said['error']}", file=sys.stderr)
            worker.close()
        else:
            workers.append(worker)
    try:
        for number in range(rounds + 1):  # the first does not count
            for test in tests:
                for worker in workers:
                    said = worker.ask(test=test)
                    if "error" in said:
                        print(f"{worker.name}: {test}: {said['error']}", file=sys.stderr)
                    elif number:
                        rates.setdefault((worker.name, test), []).append(said["rate"])
            print(f"round {number} of {rounds}", file=sys.stderr)
    finally:
        for worker in workers:
            worker.close()
    return [
        {
            "peer": peer,
            "test": test,
            "threads": threads,
            "tok_s": round(statistics.median(found), 1),
            "best": round(max(found), 1),
        }
        for (peer, test), found in sorted(rates.items(), key=lambda one: tests.index(one[0][1]))
    ]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=_DEFAULT)
    parser.add_argument("--threads", default="1", help="numbers, separated by commas")
    parser.add_argument("--tests", default="pp512,tg64,tg64@1024")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker)
        return
    if not options.model.is_file():
        parser.error(f"{options.model} is not there: run `make demo` or name a .gguf file")
    tests, engines = options.tests.split(","), options.engines.split(",")
    unknown = [name for name in engines if name not in ENGINES]
    if unknown:
        parser.error(f"unknown engines {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    rows = []
    for threads in map(int, options.threads.split(",")):
        rows += measure(options.model, threads, tests, engines, options.rounds)
    for row in rows:
        print(
            f"{row['peer']:18} {row['test']:12} {row['threads']} threads  "
            f"{row['tok_s']:9.1f} tokens/s  best {row['best']:.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
