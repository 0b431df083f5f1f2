"""A layer of routed experts with int4 weights: halfbyte and other engines, side by side in one run.

    python benchmarks/moe.py --tokens 1,16,256 --threads 1 --peers ort,ggml,zentorch --json rows.json

The layer is Qwen3-30B-A3B's: 128 experts, 8 per token, hidden 2048, inner 768, groups of 128. Prints a table and
writes rows {peer, tokens, threads, us, us_min, gmacs, relative_error}; a peer that cannot be measured has a row
{peer, threads, missing} that says why. ONNX Runtime's time holds its routing, which is small, ggml's leaves out the sum
of a token's slots; the others start after the routing. With one token each call takes another routing, so that weights
come from memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from interleave import Worker, answer, pin, time_calls
from peers.moe_problem import MOE_PEERS, MoePeer, MoeProblem, make_moe

_ROUTINGS = {1: 8, 16: 2}


def work(name: str) -> None:
    """The worker's loop: build the layer, check it, time it."""
    peer: MoePeer | None = None
    problem: MoeProblem | None = None
    calls: dict[int, list[Any]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "build":
                pin(question["problem"]["threads"])
                problem = MoeProblem(**question["problem"])
                peer = make_moe(name)
                peer.build(problem)
                x, logits, ids, factors = problem.routed(4, 0)
                got = peer.result(peer.call(x, logits, ids, factors)())
                want = problem.exact(x, ids, factors)
                answer(relative_error=float(np.linalg.norm(got - want) / np.linalg.norm(want)))
            else:
                assert peer is not None and problem is not None
                tokens = question["tokens"]
                if tokens not in calls:
                    seeds = range(_ROUTINGS.get(tokens, 1))
                    calls = {tokens: [peer.call(*problem.routed(tokens, seed)) for seed in seeds]}
                answer(us=time_calls(calls[tokens], question["seconds"], problem.threads == 1))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}"[:300])


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    names = list(dict.fromkeys(["halfbyte", *options.peers.split(",")]))
    if unknown := [name for name in names if name not in MOE_PEERS]:
        raise SystemExit(f"unknown peers: {', '.join(unknown)}; known: {', '.join(MOE_PEERS)}")
    for threads in map(int, options.threads.split(",")):
        problem = MoeProblem(threads=threads, cpu=options.cpu)
        workers = {name: Worker("moe.py", name, threads) for name in names}
        errors = {}
        for name, worker in list(workers.items()):
            built = worker.ask(do="build", problem=vars(problem))
            errors[name] = built.get("relative_error")
            if "error" in built:
                print(f"{name}: left out: {built['error']}", file=sys.stderr)
                rows.append(dict(peer=name, threads=threads, missing=built["error"]))
                workers.pop(name).close()
        for tokens in map(int, options.tokens.split(",")):
            samples: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(options.rounds):
                for name, worker in workers.items():
                    said = worker.ask(do="time", tokens=tokens, seconds=options.seconds)
                    samples[name] += said.get("us", [])
                    if "error" in said:
                        print(f"{name} tokens={tokens}: {said['error']}", file=sys.stderr)
            for name, taken in samples.items():
                if not taken:
                    continue
                us = statistics.median(taken)
                macs = 3 * tokens * problem.slots * problem.hidden * problem.inner
                row = dict(
                    peer=name, tokens=tokens, threads=threads, us=round(us, 1), us_min=round(min(taken), 1)
                )
                rows.append(row | dict(gmacs=round(macs / us / 1e3, 1), relative_error=errors[name]))
                print(
                    f"tokens={tokens:<5d}{threads} thread(s)  {name:16s}{us:12.1f} us  "
                    f"{rows[-1]['gmacs']:7.1f} GMAC/s  error {errors[name]:.1e}",
                    flush=True,
                )
        for worker in workers.values():
            worker.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,16,256", help="comma-separated")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--cpu", default="host", help="what halfbyte compiles for, as of `halfbyte compile`")
    parser.add_argument("--peers", default="ort", help="of " + ", ".join(MOE_PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="per peer, cell and round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    rows = measure(options)
    measured = [row for row in rows if "missing" not in row]
    ours = {(row["tokens"], row["threads"]): row["us"] for row in measured if row["peer"] == "halfbyte"}
    for row in measured:
        if not row["peer"].startswith("halfbyte"):
            ratio = row["us"] / ours[row["tokens"], row["threads"]]
            print(f"tokens={row['tokens']} threads={row['threads']}: {ratio:.2f} times {row['peer']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
