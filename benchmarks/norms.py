"""RMSNorms by themselves: the dispatches of IREE's own code, and halfbyte's, on one thread.

    python benchmarks/norms.py [--rounds 5] [--calls 200]

Compiles the norm of Qwen3 as a graph, as it is and rewritten, profiles calls of both in turns (dispatches.py), and
prints a table in Markdown of the best rounds: microseconds of all dispatches of a call.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from dispatches import profile
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import halfbyte
from halfbyte.passes.find_norms import FindNorms
from halfbyte.passes.pipeline import run_passes
from halfbyte.passes.program import Program

_BUILD = Path("build/benchmarks/norms")
_SHAPES = ((512, 128), (16, 128), (1, 576), (1, 2048), (512, 2048))
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def compiled(rows: int, width: int, dtype: str, ours: bool) -> Path:
    x = torch.zeros(rows, width, dtype=_DTYPES[dtype])
    sizes = ({0: torch.export.Dim("T", min=0, max=65536)},) if rows > 1 else None
    program = Program(
        {"forward": torch.export.export(Qwen3RMSNorm(width).to(x.dtype), (x,), dynamic_shapes=sizes)}
    )
    run_passes(program, [FindNorms()] if ours else [])
    return halfbyte.compile(program, _BUILD / f"{rows}x{width}x{dtype}{'_ours' * ours}").path


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    print("| rows | IREE, us | halfbyte, us | ratio |\n|---|---|---|---|")
    for dtype in _DTYPES:
        for rows, width in _SHAPES:
            bundles = {ours: compiled(rows, width, dtype, ours) for ours in (False, True)}
            best = dict.fromkeys(bundles, float("inf"))
            for _ in range(options.rounds):
                for ours, out in bundles.items():
                    given = [f"{rows}x{width}x{dtype}=1.5"]
                    made = profile(out, "forward", given, options.calls)
                    best[ours] = min(best[ours], sum(row["count"] * row["us"] for row in made))
            theirs, mine = best[False], best[True]
            print(
                f"| {dtype} {rows} x {width} | {theirs:.2f} | {mine:.2f} | {theirs / mine:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
