"""A layer whose weight is quantized on disk: what its headers tell, and how to read it."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.passes.ops.int8_roundings import FixedRounding
from halfbyte.passes.report import Refusal
from halfbyte.passes.scheme import Activations, Scheme
from halfbyte.passes.weight import Weight


@dataclass(frozen=True, kw_only=True)
class StoredLayer(abc.ABC):
    """One layer as its tensors have it; every format has its own kind.

    Attributes:
        name: module path.
        shape: logical (N, K).
        activations: what the checkpoint asks the layer to do to its input.
        refused_activations: when it asks for something that no operator computes.
        fixed: what its input is rounded with where ``activations`` is ``INT8_FIXED``.
    """

    name: str
    shape: tuple[int, int]
    activations: Activations = Activations.NONE
    refused_activations: Refusal | None = None
    fixed: FixedRounding | None = None

    @property
    @abc.abstractmethod
    def storage(self) -> str:
        """The format in words, e.g. ``gptq v1``."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[str, ...]:
        """What the names of its tensors may end with, e.g. ``qweight``; the first is the weight."""

    @property
    @abc.abstractmethod
    def readable(self) -> bool:
        """Whether its weights can be dequantized."""

    @abc.abstractmethod
    def scheme(self) -> Scheme | None:
        """How it is compiled, or None when `why_refused` tells why not."""

    @abc.abstractmethod
    def why_refused(self) -> tuple[str, str] | None:
        """(found, accepted) of a layer that cannot be compiled as it is."""

    @abc.abstractmethod
    def weight(self, tensors: SafetensorsFolder) -> Weight:
        """Reads, checks and unpacks the weight of a layer that has a `scheme`.

        Raises:
            CheckpointError: naming the tensor, when its values are impossible.
        """

    @abc.abstractmethod
    def dequantized(self, tensors: SafetensorsFolder) -> torch.Tensor:
        """float32 [N, K] of a `readable` layer, one rounding per weight."""

    def permutation(self, tensors: SafetensorsFolder) -> torch.Tensor | None:
        """int64 [K], the activation order, if it has one."""
        return None

    def tensor_names(self) -> Iterator[str]:
        """The names its tensors may have."""
        return (f"{self.name}.{part}" for part in self.parts)
