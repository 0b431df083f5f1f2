"""Instruction sets that the GEMM has a body for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionSet:
    """One body of the GEMM and the tile it runs best with.

    Attributes:
        name: names the template ``isa_<name>.mlir.j2`` and the kernels.
        needs: CPU features in LLVM's spelling.
        lanes: int32 lanes of a vector.
        columns: columns of a tile, a divisor of 64.
        rows: by digit planes, heights of the tiles in the order they are used; the last is 1.
    """

    name: str
    needs: frozenset[str]
    lanes: int
    columns: int
    rows: Mapping[int, tuple[int, ...]]


AVX512VNNI = InstructionSet(
    "avx512vnni",
    frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    lanes=16,
    columns=64,
    # 4 rows x 64 columns are 16 accumulators; 2 planes of 4 rows would spill, 3 planes of 2 rows cost 2 %.
    rows={1: (4, 3, 2, 1), 2: (2, 1), 3: (1,)},
)
PLAIN = InstructionSet("plain", frozenset(), lanes=16, columns=16, rows={1: (2, 1), 2: (1,), 3: (1,)})

BEST_FIRST = (AVX512VNNI, PLAIN)


def best(features: Collection[str]) -> InstructionSet:
    """The fastest instruction set that a CPU with these features (LLVM's names) can run."""
    return next(isa for isa in BEST_FIRST if isa.needs <= set(features))
