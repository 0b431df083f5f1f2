"""Instruction sets that the GEMM has a body for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class InstructionSet:
    """One body of the GEMM and the tiles it runs best with.

    Attributes:
        name: names the kernels.
        body: names the template, ``isa_<body>.mlir.j2``.
        needs: CPU features in LLVM's spelling.
        lanes: int32 lanes of a vector.
        columns: columns of a tile, a divisor of 64.
        one_row: by bits of the weights and digit planes, columns of the direct form's tiles of one row where they are
            more: what is read in order, from memory, is read faster.
        rows: by digit planes, heights of the tiles of the direct form in the order they are used; the last is 1.
        panel: the same for the panel form, or empty where there is none.
        least_panel: rows from which the panel form is faster.
        tiles: the panel form multiplies by AMX.
        pairs: multiplies two rows by two columns at once.
    """

    name: str
    body: str
    needs: frozenset[str]
    lanes: int
    columns: int
    rows: Mapping[int, tuple[int, ...]]
    panel: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    least_panel: int = 0
    tiles: bool = False
    pairs: bool = False
    one_row: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def columns_of_one_row(self, bits: int, digits: int) -> int:
        """Columns of the direct form's tiles of one row."""
        return self.one_row.get((bits, digits), self.columns)


AVX512VNNI = InstructionSet(
    "avx512vnni",
    "avx512vnni",
    frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    lanes=16,
    columns=64,
    # 16 accumulators, 24 for three planes; 32 would spill.
    rows={1: (4, 3, 2, 1), 2: (2, 1), 3: (2, 1)},
    panel={1: (4, 2, 1), 2: (2, 1), 3: (2, 1)},
    least_panel=8,
)
# Rows below `least_panel` are too few for tiles of 16.
AMX = replace(
    AVX512VNNI,
    name="amx",
    needs=AVX512VNNI.needs | {"amx-tile", "amx-int8"},
    panel={1: (16,), 2: (16,), 3: (16,)},
    tiles=True,
)
AVX512BW = InstructionSet(
    "avx512bw",
    "maddubs",
    frozenset({"avx512f", "avx512bw", "avx512vl"}),
    lanes=16,
    columns=64,
    rows={1: (3, 2, 1), 2: (1,), 3: (1,)},
    panel={1: (4, 2, 1), 2: (2, 1), 3: (1,)},
    least_panel=8,
)
AVXVNNI = InstructionSet(
    "avxvnni",
    "avxvnni",
    frozenset({"avx2", "fma", "avxvnni"}),
    lanes=8,
    columns=32,
    rows={1: (3, 2, 1), 2: (1,), 3: (1,)},
    panel={1: (3, 2, 1), 2: (1,), 3: (1,)},
    least_panel=8,
)
AVX2 = InstructionSet(
    "avx2",
    "maddubs",
    frozenset({"avx2", "fma"}),
    lanes=8,
    columns=16,
    # 12 accumulators at most; those of the panel form are of int16.
    rows={1: (3, 2, 1), 2: (3, 2, 1), 3: (2, 1)},
    panel={1: (4, 2, 1), 2: (2, 1), 3: (2, 1)},
    least_panel=16,
    one_row=dict.fromkeys(((4, 1), (4, 2), (8, 1), (8, 2), (8, 3)), 64),
)
DOTPROD = InstructionSet(
    "dotprod",
    "dotprod",
    frozenset({"neon", "dotprod"}),
    lanes=4,
    columns=16,
    rows={1: (4, 2, 1), 2: (2, 1), 3: (1,)},
    panel={1: (4, 2, 1), 2: (2, 1), 3: (1,)},
    least_panel=8,
)
I8MM = InstructionSet(
    "i8mm",
    "i8mm",
    frozenset({"neon", "i8mm"}),
    lanes=4,
    columns=16,
    # Three digits of two rows are 24 accumulators: worth what spills only where weights are woven already.
    rows={1: (4, 2, 1), 2: (2, 1), 3: (1,)},
    panel={1: (4, 2, 1), 2: (2, 1), 3: (2, 1)},
    least_panel=8,
    pairs=True,
)
PLAIN = InstructionSet(
    "plain", "plain", frozenset(), lanes=16, columns=16, rows={1: (2, 1), 2: (1,), 3: (1,)}
)

# One column per thread, whose rows these are; see gpu/gemm.mlir.j2.
THREADS = InstructionSet(
    "threads", "threads", frozenset(), lanes=1, columns=64, rows={1: (8,), 2: (4,), 3: (4,)}
)

# The same with tensor cores for many rows: products of 16 rows per warp, see gpu/gemm_mma.mlir.j2.
TENSOR_CORES = replace(THREADS, name="mma", body="mma", rows={1: (2,), 2: (1,), 3: (1,)})

BEST_FIRST = (AMX, AVX512VNNI, AVX512BW, AVXVNNI, AVX2, I8MM, DOTPROD, PLAIN)


def best(features: Collection[str]) -> InstructionSet:
    """The fastest instruction set that a CPU with these features (LLVM's names) can run."""
    return next(isa for isa in BEST_FIRST if isa.needs <= set(features))
