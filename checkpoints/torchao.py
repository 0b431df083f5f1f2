"""torchao checkpoints in safetensors: each weight of the class that it had in memory.

Semantics: torchao's ``prototype/safetensors``: a tensor ``P.weight`` of a class is stored as ``P._weight_qdata``,
``P._weight_scale`` and so on; the class and its settings are JSON in the header's metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.fp8_layer import inspect_fp8
from halfbyte.checkpoints.json_file import parse_json_object
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_file import read_metadata
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.scale_blocks import ScaleBlocks
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.checkpoints.torchao_int4 import inspect_int4
from halfbyte.checkpoints.torchao_integers import inspect_int8, inspect_intx
from halfbyte.checkpoints.torchao_settings import CODES, PARTS, SCALE, TorchaoTensor
from halfbyte.checkpoints.unreadable_layer import UnreadableLayer
from halfbyte.passes.scheme import Activations

_FLOAT = "Tensor"


def _inspect_float8(weight: TorchaoTensor) -> StoredLayer:
    """A weight of Float8Tensor; errors as of the others."""
    (rows, columns), shape = weight.block_size(whole=True), weight.shape
    weight.require(CODES, SCALE)
    strategy = "tensor" if rows == shape[0] else "channel" if columns == shape[1] else "group"
    layer = inspect_fp8(
        weight.name,
        shape,
        ScaleBlocks.of(strategy, shape, rows, columns),
        weight.tensors,
        weight.contradictions,
        codes=CODES,
        scales=(SCALE,),
    )
    asked = Activations.NONE if weight.said.get("act_quant_kwargs") is None else Activations.FP8
    return dataclasses.replace(layer, activations=asked)


_CLASSES: dict[str, Callable[[TorchaoTensor], StoredLayer]] = {
    "IntxUnpackedToInt8Tensor": inspect_intx,
    "Int8Tensor": inspect_int8,
    "Int4Tensor": inspect_int4,
    "Float8Tensor": _inspect_float8,
}


@dataclass(frozen=True)
class TorchaoReader:
    """Layers that have a ``_weight_qdata``.

    Attributes:
        classes: what the metadata say of every parameter: its class and its settings.
    """

    classes: dict[str, dict[str, Any]]
    where: str = "the metadata of the safetensors"
    format: str = "torchao"
    weights: tuple[str, ...] = (CODES,)

    def quantizes(self, layer: str) -> bool:
        return self._class(layer).get("_type", _FLOAT) != _FLOAT

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        return any(f"{layer}.{part}" in tensors for part in PARTS)

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        kind = self._class(name).get("_type")
        said = self._class(name).get("_data")
        if not isinstance(kind, str) or kind not in _CLASSES or not isinstance(said, dict):
            return UnreadableLayer(
                name=name, shape=shape, kind="torchao", found=f"a tensor of class {kind!r}"[:200],
                accepted=", ".join(_CLASSES), names=PARTS,
            )  # fmt: skip
        return _CLASSES[kind](TorchaoTensor(name, shape, said, tensors, contradictions))

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
