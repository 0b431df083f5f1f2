"""A checkpoint whose float head is rounded when it is read: for models whose large vocabulary costs most of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from halfbyte.checkpoints.architecture import EMBEDDING, HEAD
from halfbyte.checkpoints.changed_checkpoint import ChangedCheckpoint
from halfbyte.checkpoints.checkpoint import Checkpoint, LayerInfo
from halfbyte.errors import UsageError
from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor, Weight, dtype_name

_CHOICES = ("keep", "int8", "int4")
_ROWS = 4096  # rounded at a time, so that memory holds little beside the codes


class _Kind(NamedTuple):
    bits: int
    group: int


class FloatHead(NamedTuple):
    """A head in float: its name, the tensor that holds its weight (a tied one's is the embedding's), and its shape."""

    name: str
    stored: str
    shape: tuple[int, int]
    bias: bool


_KINDS = {"int8": _Kind(8, 64), "int4": _Kind(4, 32)}


def float_head(checkpoint: Checkpoint) -> FloatHead | None:
    """The head that could be rounded; None if it is quantized already, or not there."""
    name = checkpoint.name_of(HEAD)
    layer, own = checkpoint.layers.get(name), f"{name}.weight"
    if layer is not None and (layer.scheme is not None or layer.refusal is not None):
        return None
    stored = own if own in checkpoint.floats else checkpoint.name_of(f"{EMBEDDING}.weight")
    if stored not in checkpoint.floats:
        return None
    rows, width = checkpoint.floats[stored].shape
    return FloatHead(name, stored, (rows, width), layer is not None and layer.bias)


def with_head(checkpoint: Checkpoint, choice: str) -> Checkpoint:
    """The checkpoint with its head as chosen: ``keep`` leaves it, ``int8`` and ``int4`` round a float one.

    A head that shares the weight of the embedding no longer does: the embedding stays as it is.

    Raises:
        UsageError: no such choice, a head that is quantized already, or no head.
    """
    if choice == "keep":
        return checkpoint
    kind, name = _KINDS.get(choice), checkpoint.name_of(HEAD)
    if kind is None:
        raise UsageError("no such choice", where="lm_head", found=repr(choice), accepted=", ".join(_CHOICES))
    layer = checkpoint.layers.get(name)
    if layer is not None and (layer.scheme is not None or layer.refusal is not None):
        raise UsageError(
            "the head of this checkpoint is quantized already",
            where=name,
            found=layer.storage,
            accepted="a head in float",
            advice="leave --lm-head at keep",
        )
    head = float_head(checkpoint)
    if head is None:
        raise UsageError("this checkpoint has no head that could be rounded", where=name)
    return _RoundedHead(checkpoint, head, kind)


def rounded(name: str, weight: torch.Tensor, bits: int, group: int) -> QuantTensor:
    """A float weight [N, K], each code the nearest: symmetric, f32 scales, groups of inputs.

    8 bits: the largest of a group becomes 127 or -127. 4 bits: it becomes -8, whatever its sign (as in GGUF's Q4_0).
    """
    outputs, inputs = weight.shape
    groups, middle = -(-inputs // group), 1 << (bits - 1)
    codes = torch.empty((outputs, inputs), dtype=torch.uint8)
    scales = torch.empty((outputs, groups))
    for start in range(0, outputs, _ROWS):
        rows = weight[start : start + _ROWS].float()
        padded = torch.nn.functional.pad(rows, (0, groups * group - inputs)).reshape(len(rows), groups, group)
        extreme = padded.gather(-1, padded.abs().argmax(-1, keepdim=True))
        scale = extreme.abs() / (middle - 1) if bits == 8 else extreme / -middle
        steps = torch.where(scale == 0, 0.0, padded / scale).round() + middle
        fitting = steps.clamp(0, 2 * middle - 1).to(torch.uint8).reshape(len(rows), -1)
        codes[start : start + _ROWS] = fitting[:, :inputs]
        scales[start : start + _ROWS] = scale[..., 0]
    return QuantTensor(name, codes, scales, group if groups > 1 else inputs, bits=bits)


class _RoundedHead(ChangedCheckpoint):
    def __init__(self, inner: Checkpoint, head: FloatHead, kind: _Kind) -> None:
        name, stored, shape, bias = head
        one_group = shape[1] <= kind.group
        scheme = WeightScheme(
            shape[1] if one_group else kind.group, one_group, Zero.SYMMETRIC, "f32", False, kind.bits
        )
        known = inner.layers.get(name)
        layer = LayerInfo(
            name,
            shape,
            known.storage if known is not None else f"float {dtype_name(inner.floats[stored].dtype)}",
            scheme,
            bias=bias,
            reason=f"rounded by --lm-head int{kind.bits}",
        )
        config = inner.config | {"tie_word_embeddings": False}
        super().__init__(inner, config=config, layers={**inner.layers, name: layer})
        self._name, self._stored, self._kind = name, stored, kind

    def quantized(self, layer: str) -> Weight:
        if layer != self._name:
            return self.inner.quantized(layer)
        return rounded(layer, self.inner.float_tensor(self._stored), *self._kind)

    def permutation(self, layer: str) -> torch.Tensor | None:
        return None if layer == self._name else self.inner.permutation(layer)
