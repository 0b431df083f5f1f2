"""Which weights share a scale: one scale for all, one per output, per group of inputs, or per block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError

_BLOCK = re.compile(r"(\d{1,6})x(\d{1,6})")


@dataclass(frozen=True)
class ScaleBlocks:
    """Blocks of a weight [N, K] that share a scale; the last ones may be smaller.

    Attributes:
        strategy: ``tensor``, ``channel`` (an output), ``group`` or ``block``.
        outputs: rows per block, at most N.
        inputs: columns per block, at most K.
    """

    strategy: str
    outputs: int
    inputs: int

    @classmethod
    def of(cls, strategy: str, shape: tuple[int, int], outputs: int = 1, inputs: int = -1) -> ScaleBlocks:
        """The blocks of a strategy in a weight [N, K].

        Args:
            outputs: rows of a ``block``.
            inputs: columns of a ``block`` or ``group``.
        """
        rows = {"tensor": shape[0], "block": min(outputs, shape[0])}.get(strategy, 1)
        return cls(
            strategy,
            rows,
            min(inputs, shape[1]) if strategy in ("group", "block") and inputs > 0 else shape[1],
        )

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many blocks a weight of this shape has, along N and K."""
        return -(-shape[0] // self.outputs), -(-shape[1] // self.inputs)


def block_sizes(value: Any, key: str, where: str) -> tuple[int, int]:
    """(outputs, inputs) of a block in a configuration: a list, or a text such as ``128x128``.

    Raises:
        CheckpointError: anything else.
    """
    if isinstance(value, str) and (match := _BLOCK.fullmatch(value)):
        value = [int(match[1]), int(match[2])]
    sizes = isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)
    if not sizes or min(value) < 1 or max(value) > 2**20:
        raise CheckpointError(
            f"{key} is impossible",
            where=where,
            found=repr(value)[:100],
            accepted="[outputs, inputs], e.g. [128, 128]",
        )
    return value[0], value[1]


def settle_blocks(
    name: str,
    part: str,
    shape: tuple[int, int],
    said: ScaleBlocks,
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
) -> ScaleBlocks:
    """The blocks that the tensor of scales `part` is for: those of the configuration, or what its shape tells.

    Raises:
        CheckpointError: a dtype that is none of scales, or a shape that fits neither.
    """
    stored = tensors[f"{name}.{part}"]
    possible = (said, ScaleBlocks.of("channel", shape), ScaleBlocks.of("tensor", shape))
    fitting = [blocks for blocks in possible if _fits(stored.shape, blocks.grid(shape))]
    if not fitting or stored.dtype not in SCALE_DTYPES:
        check(name, part, tensors, said.grid(shape), tuple(SCALE_DTYPES))
    found = fitting[0]
    if found is not said:
        message = f"the configuration says a scale per {said.strategy}, the file has one per {found.strategy}"
        contradictions.add(name, message)
    return found


def _fits(stored: tuple[int, ...], grid: tuple[int, int]) -> bool:
    """One scale may have no dimension or one, scales of outputs one."""
    return stored == grid or (grid == (1, 1) and stored == ()) or (grid[1] == 1 and stored == grid[:1])
