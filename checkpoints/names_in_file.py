"""What a file calls the layers and parameters of a model: older names, and those within a model of text and images."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from halfbyte.checkpoints.architecture import HEAD
from halfbyte.checkpoints.experts import OLDER_NAMES

# How names of a text model begin where it is a part of a larger one: all of them; or all but the head's.
_WHOLE, _BLOCKS = "language_model.", "model.language_model."


@dataclass(frozen=True)
class NamesInFile:
    """From a model's own name of a layer or parameter to the one in a file.

    Attributes:
        prefix: of a text model that is a part of a larger one, or nothing.
        routers: they are a layer within a module, as Granite's.
        block: ``block_sparse_moe`` stands for ``mlp``.
        leaves: w1, w3, w2 stand for gate_proj, up_proj, down_proj of experts.
    """

    prefix: str = ""
    routers: bool = False
    block: bool = False
    leaves: bool = False

    @classmethod
    def of(cls, stored: Iterable[str]) -> NamesInFile:
        """Args: the names of all tensors."""
        found = list(stored)
        return cls(
            _prefix(found),
            any(".router.layer." in name for name in found),
            any(".block_sparse_moe." in name for name in found),
            any(".experts.0.w1." in name and not name.endswith(".input_scale") for name in found),
        )

    def __call__(self, name: str) -> str:
        if self.prefix == _WHOLE:
            name = _WHOLE + name
        elif self.prefix:
            name = re.sub(r"^model(\.|$)", rf"{_BLOCKS[:-1]}\1", name)
        if self.routers:
            name = re.sub(r"\.router(?=\.|$)", ".router.layer", name)
        if self.block:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if self.leaves and ".experts." in name:
            name = ".".join(OLDER_NAMES.get(part, part) for part in name.split("."))
        return name

    def is_elsewhere(self, name: str) -> bool:
        """Whether a tensor of the file belongs to another part of the larger model."""
        if not self.prefix:  # as files of Qwen2-VL and Qwen2.5-VL have it
            return name.startswith("visual.")
        return not name.startswith((self.prefix, f"{HEAD}."))


def is_head(layer: str) -> bool:
    """Whether a layer is the head, whatever model it is a part of."""
    return layer in (HEAD, _WHOLE + HEAD)


def _prefix(found: list[str]) -> str:
    if any(name.startswith(f"{_WHOLE}model.") for name in found):
        return _WHOLE
    return _BLOCKS if any(name.startswith(_BLOCKS) for name in found) else ""
