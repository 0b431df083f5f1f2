"""torchao checkpoints in safetensors: weights of the class IntxUnpackedToInt8Tensor, a signed byte per code.

Semantics: torchao's ``prototype/safetensors`` (a tensor ``P.weight`` of a class is stored as ``P._weight_qdata``,
``P._weight_scale`` and ``P._weight_zero_point``; the class and its settings are JSON in the header's metadata) and
its affine quantization, ``W[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.input_groups import settle_group_size
from halfbyte.checkpoints.integer_layer import Codes, IntegerLayer
from halfbyte.checkpoints.json_file import parse_json_object
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, read_scales, require
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_file import read_metadata
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.signed_codes import unsigned_codes
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.checkpoints.unreadable_layer import UnreadableLayer
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Activations

_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_PARTS = (_CODES, _SCALE, _ZERO)
_INTX, _FLOAT = "IntxUnpackedToInt8Tensor", "Tensor"
_BITS = {f"int{bits}": bits for bits in range(1, 9)}
_ACTIVATIONS = {None: Activations.NONE, "int8_asym_per_token": Activations.INT8}


@dataclass(frozen=True, kw_only=True)
class TorchaoLayer(IntegerLayer):
    """A layer as its tensors have it."""

    @property
    def storage(self) -> str:
        return "torchao" + ("" if self.bits == 4 else f", {self.bits} bits")

    @property
    def parts(self) -> tuple[str, ...]:
        return _PARTS

    def read(self, tensors: SafetensorsFolder) -> Codes:
        scales = read_scales(f"{self.name}.{_SCALE}", tensors)
        codes = unsigned_codes(f"{self.name}.{_CODES}", self.bits, tensors)
        return Codes(codes, unsigned_codes(f"{self.name}.{_ZERO}", self.bits, tensors), scales)


@dataclass(frozen=True)
class TorchaoReader:
    """Layers that have a ``_weight_qdata``.

    Attributes:
        classes: what the metadata say of every parameter: its class and its settings.
    """

    classes: dict[str, dict[str, Any]]
    where: str = "the metadata of the safetensors"
    format: str = "torchao"
    weights: tuple[str, ...] = (_CODES,)

    def quantizes(self, layer: str) -> bool:
        return self._class(layer).get("_type", _FLOAT) != _FLOAT

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        return any(f"{layer}.{part}" in tensors for part in _PARTS)

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        kind = self._class(name).get("_type")
        said = self._class(name).get("_data")
        if kind != _INTX or not isinstance(said, dict):
            return UnreadableLayer(
                name=name, shape=shape, kind="torchao", found=f"a tensor of class {kind!r}"[:200],
                accepted=_INTX, names=_PARTS,
            )  # fmt: skip
        bits, group_size = _bits(name, said), _group_size(name, said, shape)
        require(name, tensors, *_PARTS)
        check(name, _CODES, tensors, shape, (torch.int8,))
        groups = _groups(name, shape, tensors)
        check(name, _ZERO, tensors, (shape[0], groups), (torch.int8,))
        asked = said.get("activation_quantization")
        if not isinstance(asked, str | None) or asked not in _ACTIVATIONS:
            raise _impossible(name, "activation_quantization", asked, "int8_asym_per_token or null")
        if asked is not None:
            contradictions.add(
                name, "the checkpoint asks for activations with zero points, here they are symmetric"
            )
        return TorchaoLayer(
            name=name,
            shape=shape,
            activations=_ACTIVATIONS[asked],
            bits=bits,
            groups=groups,
            group_size=settle_group_size(name, _SCALE, shape[1], groups, None, group_size, contradictions),
            symmetric=not bool(tensors.read(f"{name}.{_ZERO}").any()),
            scale_dtype=SCALE_DTYPES[tensors[f"{name}.{_SCALE}"].dtype],
        )

    def _class(self, layer: str) -> dict[str, Any]:
        return self.classes.get(f"{layer}.weight", {})


def open_torchao(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``torchao``.

    Raises:
        CheckpointError: metadata that are no JSON, or whatever is wrong with the tensors.
    """
    classes = {}
    for path in dict.fromkeys(stored.path for stored in folder.tensors.values()):
        for name, text in read_metadata(path).items():
            if name.endswith(".weight"):
                classes[name] = parse_json_object(text.encode(), f"{path.name}, metadata of {name[:200]}")
    return open_quantized(folder, TorchaoReader(classes))


def _bits(name: str, said: dict[str, Any]) -> int:
    dtype = said.get("target_dtype")
    text = dtype.get("_data") if isinstance(dtype, dict) else None
    if not isinstance(text, str) or text not in _BITS:
        raise _impossible(name, "target_dtype", dtype, "int4 or int8")
    return _BITS[text]


def _group_size(name: str, said: dict[str, Any], shape: tuple[int, int]) -> int:
    block = said.get("block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(part) is int for part in block):
        outputs, inputs = block
        if outputs == 1 and 1 <= inputs <= shape[1]:
            return int(inputs)
    raise _impossible(name, "block_size", block, f"[1, inputs per group], at most [1, {shape[1]}]")


def _groups(name: str, shape: tuple[int, int], tensors: SafetensorsFolder) -> int:
    stored = tensors[f"{name}.{_SCALE}"]
    groups = stored.shape[1] if len(stored.shape) == 2 else 0
    check(name, _SCALE, tensors, (shape[0], min(max(groups, 1), shape[1])), tuple(SCALE_DTYPES))
    return groups


def _impossible(layer: str, key: str, found: Any, accepted: str) -> CheckpointError:
    return CheckpointError(
        f"the metadata of the weight give an impossible {key}",
        where=f"{layer}.weight",
        found=repr(found)[:200],
        accepted=accepted,
    )
