"""Linear layers with int4 weights: halfbyte and other engines, side by side in one run.

    python benchmarks/linear.py --shapes 4096x4096 --group 128 --m 1,16,256 --threads 1 --peers ort --json rows.json

Prints a table and writes rows {peer, mode, m, k, n, group, threads, cold, cpu, us, us_min, gmacs, gops, relative_error,
of_limit}. Peers beyond ONNX Runtime and PyTorch are optional; their files say how to install them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from interleave import Worker, answer, pin, time_calls
from peers import MODES, PEERS, Peer, Problem, make
from roofline import draw

# The whole numbers among fp4's values, around 8.
_WHOLE_FP4 = np.array([8, 8, 9, 9, 10, 11, 12, 14, 8, 7, 7, 6, 6, 5, 4, 2], np.uint8)
_COLD_BYTES = 160 << 20  # more than a last-level cache holds


def weights(
    inputs: int, outputs: int, group: int, copies: int, fp4: bool = False
) -> tuple[list[Any], list[Any]]:
    """Seeded codes and scales, which are exact in any 16-bit float; with ``fp4`` the weights are values of its."""
    codes, scales = [], []
    for copy in range(copies):
        rng = np.random.default_rng(copy)
        drawn = rng.integers(0, 16, (outputs, inputs), dtype=np.uint8)
        codes.append(_WHOLE_FP4[drawn] if fp4 else drawn)
        steps = rng.integers(128, 256, (outputs, inputs // group)).astype(np.float32)
        scales.append(steps * np.float32(2.0**-15))
    return codes, scales


def activations(m: int, inputs: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(m).standard_normal((m, inputs)).astype(np.float32)


def work(name: str) -> None:
    """The worker's loop: build a problem, check it, time it."""
    peer: Peer | None = None
    problem: Problem | None = None
    calls: dict[Any, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "build":
                sizes, fp4 = (question[key] for key in ("k", "n", "group", "copies")), "_fp4" in name
                codes, scales = weights(*sizes, fp4=fp4)
                problem = Problem(codes, scales, question["group"], question["threads"], question["cpu"])
                pin(question["threads"])
                peer = make(name)
                peer.build(problem)
                calls = {}
                x = activations(4, problem.inputs)
                got = peer.result(peer.calls(x)[0]())
                dense = (codes[0].astype(np.float64) - 8) * np.repeat(scales[0], question["group"], 1)
                want = x.astype(np.float64) @ dense.T
                answer(relative_error=float(np.linalg.norm(got - want) / np.linalg.norm(want)))
            else:
                key = (question["m"], question["cold"])
                assert peer is not None and problem is not None
                if key not in calls:
                    made = peer.calls(activations(question["m"], problem.inputs))
                    calls = {key: made if question["cold"] else made[:1]}
                answer(us=time_calls(calls[key], question["seconds"], question["threads"] == 1))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}"[:300])


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    modes = options.mode.split(",")
    limits = limits_of_this_machine() if options.limits else None
    names = [f"{peer}_{mode}" for mode in modes for peer in ["halfbyte", *options.peers.split(",")] if peer]
    names = [name for name in dict.fromkeys(names) if name in PEERS]
    for shape in options.shapes.split(","):
        k, n = map(int, shape.split("x"))
        copies = max(2, -(-_COLD_BYTES // (k * n // 2))) if options.cold else 1
        for threads in map(int, options.threads.split(",")):
            workers = {name: Worker("linear.py", name, threads) for name in names}
            errors = {}
            for name, worker in list(workers.items()):
                size = dict(k=k, n=n, group=options.group, copies=copies, threads=threads)
                built = worker.ask(do="build", cpu=options.cpu, **size)
                errors[name] = built.get("relative_error")
                if "error" in built:
                    print(f"{name}: left out: {built['error']}", file=sys.stderr)
                    workers.pop(name).close()
            for m in map(int, options.m.split(",")):
                for cold in (False, True) if options.cold else (False,):
                    samples: dict[str, list[float]] = {name: [] for name in workers}
                    for _ in range(options.rounds):
                        for name, worker in workers.items():
                            said = worker.ask(
                                do="time", m=m, cold=cold, seconds=options.seconds, threads=threads
                            )
                            samples[name] += said.get("us", [])
                            if "error" in said:
                                print(f"{name} m={m}: {said['error']}", file=sys.stderr)
                    for name, taken in samples.items():
                        if not taken:
                            continue
                        us = statistics.median(taken)
                        peer, _, mode = name.rpartition("_")
                        row = dict(
                            peer=peer,
                            mode=mode,
                            m=m,
                            k=k,
                            n=n,
                            group=options.group,
                            threads=threads,
                            cold=cold,
                            cpu=options.cpu,
                        )
                        row |= dict(us=round(us, 2), us_min=round(min(taken), 2))
                        row |= dict(gmacs=round(m * k * n / us / 1e3, 1), relative_error=errors[name])
                        row["gops"] = round(2 * m * k * n / us / 1e3, 1)
                        row["of_limit"] = of_limit(row, limits)
                        rows.append(row)
                        print(table_row(row), flush=True)
            for worker in workers.values():
                worker.close()
    return rows


# The units that a mode can run on, its passes over them, and bytes of a weight.
_INT8, _BF16 = ("dot_gmacs", "tile_gmacs"), ("fma_gmacs", "bf16_gmacs", "bf16_tile_gmacs")
_NEEDS: dict[str, tuple[tuple[str, ...], int, float]] = {
    "w4a8": (_INT8, 1, 0.5),
    "w8a8": (_INT8, 1, 1.0),
    "w8a16": (_INT8, 3, 1.0),
    "w4a16": (_INT8, 3, 0.5),
    "w4a16bf16": (_INT8, 2, 0.5),
    "w4afp8": (_INT8, 3, 0.5),
    "fp4a8": (_INT8, 1, 0.5),
    "fp4a16": (_INT8, 3, 0.5),
    "fp8": (_BF16, 1, 1.0),
    "fp8a16": (_BF16, 1, 1.0),
}


def limits_of_this_machine() -> dict[str, Any]:
    """As `limits.measure`, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("limits.py"))]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    )
    return found


def of_limit(row: dict[str, Any], limits: dict[str, Any] | None) -> float | None:
    """The share of what halfbyte's kernels could do at best: the later of arithmetic and reading the weights."""
    if limits is None or row["peer"] != "halfbyte" or row["threads"] != 1:
        return None
    units, passes, weight_bytes = _NEEDS[row["mode"]]
    best = max(limits[unit] or 0 for unit in units)
    if not best:
        return None
    size = row["k"] * row["n"] * (weight_bytes + 2 / row["group"])
    reads = {int(mib): rate for mib, rate in limits["read_gbs"].items()}
    nearest = min(reads, key=lambda mib: abs(mib * 2**20 - (_COLD_BYTES if row["cold"] else size)))
    arithmetic = row["m"] * row["k"] * row["n"] * passes / best / 1e3
    return round(max(arithmetic, size / reads[nearest] / 1e3) / row["us"], 3)


def table_row(row: dict[str, Any]) -> str:
    where = "cold" if row["cold"] else "warm"
    name = f"{row['peer']} {row['mode']}"
    share = "" if row["of_limit"] is None else f"  {100 * row['of_limit']:.0f} % of the limit"
    return (
        f"{row['k']}x{row['n']} g{row['group']} m={row['m']:<5d}{row['threads']} thread(s) {where}  {name:20s}"
        f"{row['us']:10.1f} us  {row['gmacs']:7.1f} GMAC/s  error {row['relative_error']:.1e}{share}"
    )


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """How many times halfbyte is faster, per cell and peer."""
    out = []
    cell = lambda row: tuple(row[key] for key in ("mode", "k", "n", "group", "m", "threads", "cold"))  # noqa: E731
    ours = {cell(row): row["us"] for row in rows if row["peer"] == "halfbyte"}
    for row in rows:
        if row["peer"] != "halfbyte" and cell(row) in ours:
            where = "cold" if row["cold"] else "warm"
            ratio = row["us"] / ours[cell(row)]
            out.append(
                f"{row['mode']} {row['k']}x{row['n']} m={row['m']} {where}: {ratio:.2f} times {row['peer']}"
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="4096x4096", help="KxN,KxN,...")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--m", default="1,16,256", help="tokens, comma-separated")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--cpu", default="host", help="what halfbyte compiles for, as of `halfbyte compile`")
    parser.add_argument("--mode", default="w4a8,w4a16", help="of " + ", ".join(MODES))
    parser.add_argument(
        "--peers", default="ort", help="of " + ", ".join(sorted({p.rpartition("_")[0] for p in PEERS}))
    )
    parser.add_argument(
        "--cold", action="store_true", help="also walk through more weights than a cache holds"
    )
    parser.add_argument(
        "--limits", action=argparse.BooleanOptionalAction, default=True, help="measure the machine too"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="per peer, cell and round")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--roofline", type=Path, metavar="SVG", help="draw the rows against the machine's limits"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    rows = measure(options)
    print("\n".join(ratios(rows)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.roofline:
        options.roofline.write_text(draw(rows, limits_of_this_machine()))


if __name__ == "__main__":
    main()
