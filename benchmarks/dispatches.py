"""Where the time of one call goes, dispatch by dispatch.

    python benchmarks/dispatches.py OUT [--function decode] [--position 100] [--tokens 1] [--calls 20] [--json FILE]

Runs the bundle by iree-benchmark-module on one thread, weights in memory, with IREE's own profile of what the host
executes, and prints a table in Markdown: dispatches of the same executable together, how often a call has them, and
the microseconds of one and of all, by the mean and (where other work disturbs less) by the shortest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from halfbyte.runtime.manifest import Manifest

_TOOLS = Path(sys.executable).parent


def profile(out: Path, function: str, inputs: list[str], calls: int) -> list[dict[str, Any]]:
    """Rows with dispatch, count (per call), us, us_min (of one) and share (of all)."""
    flags = [
        "--device=local-sync" if line.startswith("--device=") else line
        for line in (out / f"{function}.flags").read_text().splitlines()
    ]
    with tempfile.TemporaryDirectory() as folder:
        recorded = f"{folder}/profile"
        command = [
            "iree-benchmark-module",
            *(f"--input={text}" for text in inputs),
            *flags,
            "--parameter_mode=preload",
            f"--benchmark_min_time={calls}x",
            "--device_profiling_mode=host-execution,executable-metadata",
            f"--device_profiling_output={recorded}",
        ]
        _run(command, out)
        lines = _run(["iree-profile", "statistics", "--format=jsonl", recorded], out).splitlines()
    rows = []
    for line in lines:
        row = json.loads(line)
        if row.get("row_type") == "host_execution_function":
            count = row["sample_count"]
            rows.append(
                {
                    "dispatch": row["function_name"],
                    "count": count / calls,
                    "us": row["total_duration_ns"] / count / 1e3,
                    "us_min": row["minimum_duration_ns"] / 1e3,
                }
            )
    whole = sum(row["count"] * row["us"] for row in rows)
    for row in rows:
        row["share"] = row["count"] * row["us"] / whole
    return sorted(rows, key=lambda row: -row["share"])


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [str(_TOOLS / command[0]), *command[1:]], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="a bundle of a language model")
    parser.add_argument("--function", default="decode", choices=("forward", "prefill", "decode"))
    parser.add_argument("--position", type=int, default=100, help="tokens that the caches hold")
    parser.add_argument("--tokens", type=int, default=1, help="fed by the call; 1 for decode")
    parser.add_argument(
        "--sampling",
        default="0,0,1,0",
        help="temperature, top_k, top_p and a random number, for programs that draw tokens",
    )
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    inputs = [f"{options.tokens}xi64=5"]
    if options.function != "forward":
        inputs.append(f"1xi64={options.position}")
        if any(
            tensor.name == "sampling" for tensor in Manifest.load(options.out).entry_points["decode"].inputs
        ):
            inputs.append(f"4xf32={options.sampling}")
    rows = profile(options.out, options.function, inputs, options.calls)
    print("| dispatch | per call | us each | shortest | us in all | share |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['dispatch']} | {row['count']:g} | {row['us']:.2f} | {row['us_min']:.2f} "
            f"| {row['count'] * row['us']:.0f} | {100 * row['share']:.1f} % |"
        )
    for label in ("us", "us_min"):
        total = sum(row["count"] * row[label] for row in rows)
        print(f"{'all' if label == 'us' else 'all, by the shortest'}: {total / 1e3:.2f} ms")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
