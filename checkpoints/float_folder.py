"""A folder whose weights are all in float: nothing is quantized, every layer is computed as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from halfbyte.checkpoints.checkpoint import Checkpoint
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.tokenizer import save_folder_tokenizer
from halfbyte.errors import CheckpointError
from halfbyte.passes.weight import Weight

_QUANTIZED_PARTS = (
    ".qweight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".qzeros",
    "._weight_qdata",
)


@dataclass(kw_only=True)
class FolderCheckpoint(Checkpoint):
    """A folder of safetensors; readers of quantized folders extend it.

    Attributes:
        tensors: headers of all tensors.
    """

    tensors: SafetensorsFolder

    def quantized(self, layer: str) -> Weight:
        raise KeyError(layer)

    def float_tensor(self, name: str) -> torch.Tensor:
        if name not in self.floats:
            raise KeyError(name)
        return self.tensors.read(name)

    def permutation(self, layer: str) -> torch.Tensor | None:
        return None

    def save_tokenizer(self, folder: Path) -> list[str]:
        return save_folder_tokenizer(self.path, folder, self.warnings)


def open_float(folder: ModelFolder) -> FolderCheckpoint:
    """A folder without a quantization configuration.

    Raises:
        CheckpointError: quantized tensors without a configuration that tells how to read them.
    """
    stray = [name for name in folder.tensors if name.endswith(_QUANTIZED_PARTS)]
    if stray:
        raise CheckpointError(
            "there are quantized tensors, but no quantization configuration",
            where=folder.path.name,
            found=stray[0][:200],
            accepted="quantization_config in config.json, or quantize_config.json beside it",
            advice="fetch the whole checkpoint",
        )
    floats, layers = folder.float_parts((), ())
    return FolderCheckpoint(
        path=folder.path,
        format="float",
        config=folder.config,
        layers={name: layers[name] for name in folder.architecture.linears if name in layers},
        floats=floats,
        warnings=folder.warnings,
        name_of=folder.name_of,
        tensors=folder.tensors,
    )
