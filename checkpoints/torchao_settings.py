"""What the metadata of torchao's safetensors say of a tensor: JSON of its class and settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.experts import is_of_expert
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.static_input import static_input
from halfbyte.errors import CheckpointError
from halfbyte.passes.ops.int8_roundings import FixedRounding
from halfbyte.passes.scheme import Activations

CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_PRE_SCALE = "_weight_act_pre_scale"
_STATIC = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
PARTS = (CODES, SCALE, ZERO, _PRE_SCALE, *_STATIC)


@dataclass(frozen=True)
class TorchaoTensor:
    """A weight to be looked at.

    Attributes:
        name: module path of its layer.
        shape: (N, K) of the layer in the model.
        said: its settings.
        tensors: of the folder.
        contradictions: gets the notes.
    """

    name: str
    shape: tuple[int, int]
    said: dict[str, Any]
    tensors: SafetensorsFolder
    contradictions: Contradictions

    def block_size(self, whole: bool) -> tuple[int, int]:
        """(outputs, inputs) that share a scale.

        Args:
            whole: whether one scale for all is possible, too, for which an empty list stands.

        Raises:
            CheckpointError: neither one output and at most all inputs, nor all of the weight.
        """
        block, shape = self.said.get("block_size"), self.shape
        if whole and block in ([], None, list(shape)):
            return shape
        if isinstance(block, list) and len(block) == 2 and all(type(part) is int for part in block):
            outputs, inputs = block
            if outputs == 1 and 1 <= inputs <= shape[1]:
                return 1, int(inputs)
        accepted = f"[1, inputs per group], at most [1, {shape[1]}]" + (
            f", or {list(shape)}" if whole else ""
        )
        raise self.impossible("block_size", block, accepted)

    def require(self, *parts: str) -> None:
        """Raises a `CheckpointError` that names the first missing part, or AWQ's scales of inputs."""
        require(self.name, self.tensors, *parts)
        if self.has(_PRE_SCALE):
            raise CheckpointError(
                "inputs that are scaled before the product cannot be read",
                where=f"{self.name}.{_PRE_SCALE}",
                found="a scale for every input",
                accepted="none: AWQ's scales in the norms before",
                advice="quantize the model with another tool, or without AWQ",
            )

    def check(self, part: str, shape: tuple[int, ...], dtypes: Iterable[torch.dtype], note: str = "") -> None:
        """Raises a `CheckpointError` when a part has another shape, or none of the dtypes."""
        check(self.name, part, self.tensors, shape, tuple(dtypes), note)

    def has(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.tensors

    @property
    def scale_dtype(self) -> str:
        return SCALE_DTYPES[self.tensors[f"{self.name}.{SCALE}"].dtype]

    def no_zeros(self) -> bool:
        """Whether all zero points are 0."""
        return not self.has(ZERO) or not bool(self.tensors.read(f"{self.name}.{ZERO}").any())

    def note(self, text: str) -> None:
        self.contradictions.add(self.name, text)

    def rounding(self, kind: Activations) -> Activations:
        """The rounding of a layer's activations: torchao's; of experts the kernels' own, with a note."""
        if kind is Activations.INT8 or not is_of_expert(self.name):
            return kind
        if kind is not Activations.INT8_SYMMETRIC:
            self.note("the checkpoint asks for activations with zero points, those of experts are symmetric")
        return Activations.INT8

    @property
    def has_static_scales(self) -> bool:
        return any(map(self.has, _STATIC))

    def static_input(self, symmetric: bool, codes: tuple[int, int]) -> FixedRounding | None:
        """What all tokens are rounded with; of experts None, with a note. Errors as of `static_input`."""
        if is_of_expert(self.name):
            self.note("static input scales of experts are not used, inputs are quantized per token")
            return None
        return static_input(self.name, _STATIC, symmetric, self.tensors, self.contradictions, codes)

    def impossible(self, key: str, found: Any, accepted: str) -> CheckpointError:
        return CheckpointError(
            f"{key} is impossible",
            where=f"the metadata of {self.name}.weight",
            found=repr(found)[:100],
            accepted=accepted,
        )
