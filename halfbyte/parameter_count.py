"""How many parameters a checkpoint has, and how many of them a token meets."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.checkpoints import Checkpoint

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.[^.]+")


@dataclass(frozen=True)
class ParameterCount:
    """Parameters as the model has them, whatever they are stored in; shared ones count once.

    Attributes:
        total: of the model.
        active: what a token meets: all but the experts that it is not sent to.
        blocks: that have routed experts; 0 in a dense model.
        experts: of a block, the largest number where blocks differ; 0 in a dense model.
        experts_per_token: of a block; 0 in a dense model.
    """

    total: int
    active: int
    blocks: int = 0
    experts: int = 0
    experts_per_token: int = 0

    def __str__(self) -> str:
        if not self.experts:
            return f"{_short(self.total)} parameters"
        where = "in 1 block" if self.blocks == 1 else f"in each of {self.blocks} blocks"
        return (
            f"{_short(self.total)} parameters, {_short(self.active)} of them active per token: "
            f"{self.experts_per_token} of {self.experts} experts {where}"
        )


def count_parameters(checkpoint: Checkpoint) -> ParameterCount:
    """Counts from the headers."""
    from halfbyte.checkpoints.architecture import experts_per_token

    layers = checkpoint.layers
    others = [info for name, info in checkpoint.floats.items() if name.removesuffix(".weight") not in layers]
    total = sum(math.prod(layer.shape) for layer in layers.values() if not layer.shares)
    total += sum(math.prod(info.shape) for info in others)
    blocks: dict[str, set[str]] = {}
    routed = 0
    for name, layer in layers.items():
        if (found := _EXPERT.fullmatch(name)) is not None:
            blocks.setdefault(found[1], set()).add(found[2])
            routed += math.prod(layer.shape)
    if not blocks:
        return ParameterCount(total, total)
    experts, chosen = max(map(len, blocks.values())), experts_per_token(checkpoint.config)
    active = total - routed + routed * chosen // experts
    return ParameterCount(total, active, len(blocks), experts, chosen)


def _short(count: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
