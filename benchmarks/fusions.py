"""What each fusion gains: microseconds per call of a decoder with all of them, and with all but one.

    python benchmarks/fusions.py MODEL [--rounds 5] [--activations int8] [--lm-head auto]

Compiles MODEL with every choice of `--fuse`, profiles prefill of 512 tokens and decode of one behind 100 in turns
(dispatches.py), and prints a table in Markdown of the best rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dispatches import profile

import halfbyte
from halfbyte.fusions import FUSIONS

_BUILD = Path("build/benchmarks/fusions")
_CALLS = {"prefill": (["512xi64=5", "1xi64=0"], 3), "decode": (["1xi64=5", "1xi64=100"], 40)}


def choices() -> dict[str, str]:
    """What is printed, and the option."""
    but = {f"all but {name}": ",".join(other for other in FUSIONS if other != name) for name in FUSIONS}
    return {"all": "all", **but, "none": "none"}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--lm-head", default="auto")
    options = parser.parse_args()
    settings = {"activations": options.activations, "lm_head": options.lm_head, "max_context": 1024}
    for label, fuse in choices().items():
        print(f"compiling: {label}", flush=True)
        halfbyte.compile(options.model, _BUILD / fuse, halfbyte.CompileOptions(**settings, fuse=fuse))
    times: dict[tuple[str, str], list[float]] = {}
    dispatches: dict[tuple[str, str], float] = {}
    order = list(choices().items())
    for number in range(options.rounds):
        for function, (inputs, calls) in _CALLS.items():
            for label, fuse in (*order[number % len(order) :], *order[: number % len(order)]):
                rows = profile(_BUILD / fuse, function, inputs, calls)
                times.setdefault((label, function), []).append(sum(row["count"] * row["us"] for row in rows))
                dispatches[label, function] = sum(row["count"] for row in rows)
    print("| fused | prefill of 512, us | of all | dispatches | decode of one, us | of all | dispatches |")
    print("|---|---|---|---|---|---|---|")
    for label in choices():
        cells = []
        for function in _CALLS:
            took, whole = (min(times[which, function]) for which in (label, "all"))
            cells += [f"{took:.0f}", f"{took / whole:.3f}", f"{dispatches[label, function]:.0f}"]
        print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
