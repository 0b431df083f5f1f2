"""A Hugging Face model folder before its format is known: configuration, tensors and architecture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints.architecture import Architecture
from halfbyte.checkpoints.checkpoint import FloatInfo, LayerInfo
from halfbyte.checkpoints.decoder_shapes import architecture_of
from halfbyte.checkpoints.float_parameters import (
    drop_zero_biases,
    match_parameters,
    missing_tensor,
    settle_tied_head,
)
from halfbyte.checkpoints.folder import path_inside
from halfbyte.checkpoints.json_file import read_json_object
from halfbyte.checkpoints.model_config import checked_config
from halfbyte.checkpoints.names_in_file import NamesInFile
from halfbyte.checkpoints.quantization_config import QuantizationConfig, find_quantization_config
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder, refuse_pickles
from halfbyte.checkpoints.stacked_tensors import split_stacked
from halfbyte.errors import CheckpointError

_COMPUTED = (".rotary_emb.inv_freq",)  # old checkpoints store it, models compute it
_OF_CACHES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
_SHOWN = 5
_SHORT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


@dataclass
class ModelFolder:
    """What every reader of a folder starts from.

    Attributes:
        path: the folder.
        config: checked, without quantization.
        tensors: headers of all tensors.
        architecture: layers and parameters of the model.
        quantization: the quantization configuration, if there is one.
        glance: only its headers are asked for; readers may take a few of its small tensors for all of them.
        warnings: gathered for the checkpoint.
        name_of: from the model's own name of a layer or parameter to the one in the files.
    """

    path: Path
    config: dict[str, Any]
    tensors: SafetensorsFolder
    architecture: Architecture
    quantization: QuantizationConfig | None
    glance: bool = False
    warnings: list[str] = field(default_factory=list)
    name_of: NamesInFile = field(default_factory=NamesInFile)

    def float_parts(
        self, quantized: Iterable[str], parts: Iterable[str]
    ) -> tuple[dict[str, FloatInfo], dict[str, LayerInfo]]:
        """The float tensors and float layers; warns of tensors nothing uses, settles a tied head.

        Args:
            quantized: layers that have quantized tensors instead of ``.weight``.
            parts: names of these tensors.

        Raises:
            CheckpointError: see `match_parameters`, `settle_tied_head` and `drop_zero_biases`.
        """
        layers = set(quantized)
        stored = {name: FloatInfo(tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}
        tied = settle_tied_head(
            self.config,
            self.architecture,
            quantized=self.architecture.head in layers,
            stored=stored,
            read=self.tensors.read,
            warnings=self.warnings,
        )
        weights = [f"{layer}.weight" for layer in layers]
        floats = match_parameters(self.architecture, stored, weights, tied=tied, where=self.path.name)
        floats |= {name: stored[name] for name in self.architecture.buffers if name in stored}
        self._report_unused(set(floats) | set(parts))
        return floats, self._float_layers(floats, layers, tied)

    def _float_layers(
        self, floats: dict[str, FloatInfo], quantized: set[str], tied: bool
    ) -> dict[str, LayerInfo]:
        found = {}
        for name, linear in self.architecture.linears.items():
            info = floats.get(f"{name}.weight")
            if name not in quantized and info is not None:
                head = name == self.architecture.head
                shared = f"shares the weight of {self.architecture.embedding}" if tied and head else ""
                storage = f"float {_SHORT[info.dtype]}"
                found[name] = LayerInfo(name, linear.shape, storage, None, bias=linear.bias, reason=shared)
        return found

    def _report_unused(self, used: set[str]) -> None:
        known = used | self.architecture.buffers
        unused = [name for name in self.tensors if name not in known and not name.endswith(_COMPUTED)]
        if others := [name for name in unused if self.name_of.is_elsewhere(name)]:
            count = f"{len(others)} tensors are of another part, as {others[0][:200]}"
            self.warnings.append(f"only the text model is compiled: {count}")
            unused = [name for name in unused if not self.name_of.is_elsewhere(name)]
        if any(name.endswith(_OF_CACHES) for name in unused):
            self.warnings.append(
                "scales of quantized key and value caches are not used: caches are of --kv-cache"
            )
            unused = [name for name in unused if not name.endswith(_OF_CACHES)]
        unknown, _ = drop_zero_biases(self.architecture, unused, self.tensors.read)
        if unknown:
            shown = ", ".join(name[:200] for name in unknown[:_SHOWN])
            more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
            self.warnings.append(f"tensors that no parameter of the model uses: {shown}{more}")


def open_folder(folder: Path, *, glance: bool = False) -> ModelFolder:
    """Reads configuration and headers of a folder with config.json and safetensors.

    Raises:
        CheckpointError: whatever is wrong with them.
    """
    if not (folder / "config.json").exists():
        if not any(folder.glob("*.safetensors")):
            refuse_pickles(folder)
        raise CheckpointError(
            "holds no config.json and no *.gguf",
            where=folder.name or str(folder),
            accepted="a Hugging Face model folder, or a GGUF file",
        )
    raw = read_json_object(path_inside(folder, "config.json", named_by=folder.name))
    quantization = find_quantization_config(folder, raw)
    config = checked_config(raw, "config.json")
    tensors = SafetensorsFolder(folder)
    name_of = NamesInFile.of(tensors)
    architecture = architecture_of(config).renamed(name_of)
    split_stacked(tensors, architecture.experts)
    return ModelFolder(folder, config, tensors, architecture, quantization, glance, name_of=name_of)


def refuse_both(layer: str, folder: ModelFolder, part: str) -> None:
    """Raises a `CheckpointError` when a layer has a float weight beside its quantized tensor `part`."""
    if f"{layer}.weight" in folder.tensors:
        raise CheckpointError(
            "the layer has a float weight and quantized tensors, and nothing says which counts",
            where=layer,
            found=f"{layer}.weight and {layer}.{part}",
            accepted="one of them",
        )


def require_weight(layer: str, folder: ModelFolder, part: str) -> None:
    """Raises a `CheckpointError` that names both possible tensors when the layer has neither."""
    if f"{layer}.weight" not in folder.tensors and f"{layer}.{part}" not in folder.tensors:
        wanted = dict.fromkeys((f"{layer}.{part}", f"{layer}.weight"))
        raise missing_tensor([*wanted], folder.tensors, folder.path.name)
