"""What a reader gives: a checkpoint whose headers are known and whose tensors are read one at a time."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from halfbyte.passes.ops.int8_roundings import FixedRounding
from halfbyte.passes.report import Refusal
from halfbyte.passes.scheme import Activations, Scheme
from halfbyte.passes.weight import Weight


@dataclass(frozen=True)
class LayerInfo:
    """One linear layer as the headers tell it, without reading its tensors.

    Attributes:
        name: module path in the Hugging Face model, e.g. ``model.layers.0.mlp.down_proj`` or ``lm_head``.
        shape: logical (N, K) = (outputs, inputs).
        storage: the format in words, e.g. ``gptq v1``, ``gguf q4_1``, ``float bf16``.
        scheme: how it is quantized; None when the compiled layer computes with float weights.
        activations: what the checkpoint itself asks for.
        fixed: what inputs are rounded with where that is ``INT8_FIXED``, else None.
        bias: whether the layer has one.
        reason: for scheme None of a layer that is quantized on disk: why it becomes float; else what a user should
            know of it.
        refusal: set when the layer cannot be read as asked (a bit width, a group size); compile then refuses
            it, or with ``--on-unsupported float`` takes its dequantized weights when they can be had.
        refused_activations: set when the checkpoint asks for activations that no operator computes; then
            ``activations`` is NONE, and compile has to be told to take those or others.
        shares: the parameter whose tensor is also this layer's weight, if there is one.
    """

    name: str
    shape: tuple[int, int]
    storage: str
    scheme: Scheme | None
    activations: Activations = Activations.NONE
    bias: bool = False
    reason: str = ""
    refusal: Refusal | None = None
    refused_activations: Refusal | None = None
    shares: str = ""
    fixed: FixedRounding | None = None


@dataclass(frozen=True)
class FloatInfo:
    """A float tensor as the headers tell it: its shape and the dtype it is stored in (or dequantized to)."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Checkpoint(abc.ABC):
    """An opened checkpoint.

    Attributes:
        path: the folder or file given.
        format: e.g. ``gptq v2``, ``gguf``, ``float``.
        config: the model configuration as a dict that transformers' ``AutoConfig.for_model`` understands
            (``model_type`` and so on), without any quantization_config.
        layers: every linear layer, by module path, in model order; quantized and float ones, lm_head included
            (a tied lm_head only if the file itself holds one, or holds their tensor in integers).
        floats: every tensor that a float parameter of the model can be filled from, by the model's own
            parameter name (``model.embed_tokens.weight``, norms, biases, float linears, and the dequantized
            ``.weight`` of quantized layers whose ``scheme`` is None).
        tables: embeddings that the file holds in integers, by module path; `quantized` reads them, and ``floats`` has
            them dequantized.
        warnings: contradictions between configuration and tensors, notes on what was assumed.
        name_of: from the model's own name of a layer or parameter to the one that ``layers`` and ``floats`` use.
    """

    path: Path
    format: str
    config: dict[str, Any]
    layers: Mapping[str, LayerInfo]
    floats: Mapping[str, FloatInfo]
    warnings: list[str] = field(default_factory=list)
    name_of: Callable[[str], str] = str
    tables: Mapping[str, LayerInfo] = field(default_factory=dict)

    @abc.abstractmethod
    def quantized(self, layer: str) -> Weight:
        """Reads, checks and unpacks the weight of a layer, or table, whose `LayerInfo.scheme` is set.

        Raises:
            CheckpointError: naming the layer and the tensor, when its values are impossible (NaN scales, zero
                points or g_idx out of range).
        """

    @abc.abstractmethod
    def float_tensor(self, name: str) -> torch.Tensor:
        """Reads one tensor of `floats`, in its stored dtype (float32 when it had to be dequantized)."""

    @abc.abstractmethod
    def permutation(self, layer: str) -> torch.Tensor | None:
        """int64 [K], the activation order of a layer whose scheme says ``act_order``, else None."""

    def tokenizer_source(self) -> bytes | None:
        """A digest of all that `save_tokenizer` converts; None where it only copies."""
        return None

    @abc.abstractmethod
    def save_tokenizer(self, folder: Path) -> list[str]:
        """Writes tokenizer.json and tokenizer_config.json into `folder`; the names written, [] if none."""
