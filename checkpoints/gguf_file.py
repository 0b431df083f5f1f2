"""GGUF files of the architectures llama, qwen2 and qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints import gguf_blocks as blocks
from halfbyte.checkpoints.architecture import EMBEDDING, HEAD, Architecture, LinearShape
from halfbyte.checkpoints.checkpoint import Checkpoint, FloatInfo, LayerInfo
from halfbyte.checkpoints.decoder_shapes import architecture_of
from halfbyte.checkpoints.float_parameters import drop_zero_biases, match_parameters
from halfbyte.checkpoints.folder import path_inside
from halfbyte.checkpoints.gguf_config import differences, gguf_config
from halfbyte.checkpoints.gguf_header import GgufTensor, read_gguf_header
from halfbyte.checkpoints.gguf_names import model_name, rotary_rows
from halfbyte.checkpoints.json_file import read_json_object
from halfbyte.checkpoints.tokenizer import gguf_tokenizer_source, save_gguf_tokenizer
from halfbyte.errors import CheckpointError
from halfbyte.passes.report import Refusal
from halfbyte.passes.scheme import Zero
from halfbyte.passes.weight import QuantTensor

_TABLE = "token_embd.weight"
_COMPUTED = ("rope_freqs.weight",)
_ACCEPTED = ", ".join([*blocks.INTEGER, "f16", "bf16", "f32"])


@dataclass(kw_only=True)
class GgufCheckpoint(Checkpoint):
    """A GGUF file.

    Attributes:
        file: the file itself.
        tensors: by the model's names.
        heads: attention heads whose rows are in rotary order, by layer name (q and k projections of llama).
        chat_template: of the metadata.
    """

    file: Path
    tensors: dict[str, GgufTensor]
    heads: dict[str, int]
    chat_template: str | None

    def quantized(self, layer: str) -> QuantTensor:
        found_as = self.tables.get(layer) or self.layers[layer]
        if found_as.scheme is None:
            raise KeyError(layer)
        tensor = self.tensors[f"{layer}.weight"]
        found = blocks.integer_rows(self._rows(layer, tensor.read()), tensor.type)
        for part in (found.scale, found.minimum):
            if part is not None and not bool(torch.isfinite(part).all()):
                raise _not_finite(layer, tensor)
        block = found.type
        parts, kind = (found.codes, found.scale, block.group), (block.bits, block.levels)
        return QuantTensor(layer, *parts, None, found.minimum, None, *kind)

    def float_tensor(self, name: str) -> torch.Tensor:
        if name not in self.floats:
            raise KeyError(name)
        tensor = self.tensors[name]
        layer = name.rpartition(".")[0]
        raw = tensor.read()
        if name.endswith(".bias"):
            values = blocks.float_rows(raw, tensor.type, tensor.number).reshape(tensor.shape)
            return self._rows(layer, values)
        values = blocks.float_rows(self._rows(layer, raw), tensor.type, tensor.number)
        if not blocks.is_float(tensor.type) and not bool(torch.isfinite(values).all()):
            raise _not_finite(layer, tensor)
        return values.reshape(tensor.shape)

    def permutation(self, layer: str) -> torch.Tensor | None:
        return None

    def tokenizer_source(self) -> bytes | None:
        header = min(tensor.start for tensor in self.tensors.values())
        return gguf_tokenizer_source(self.file, header, self.chat_template, self.config["vocab_size"])

    def save_tokenizer(self, folder: Path) -> list[str]:
        vocabulary = self.config["vocab_size"]
        return save_gguf_tokenizer(self.file, folder, self.warnings, self.chat_template, vocabulary)

    def _rows(self, layer: str, values: torch.Tensor) -> torch.Tensor:
        """Puts the rows of a q or k projection back from the rotary order."""
        heads = self.heads.get(layer)
        return values if heads is None else values[rotary_rows(values.shape[0], heads)]


def open_gguf(file: Path, given: Path | None = None) -> GgufCheckpoint:
    """Opens a GGUF file by its header.

    Args:
        file: the .gguf file.
        given: what the user gave, when that was the folder.

    Raises:
        CheckpointError: a damaged file, an unsupported architecture, or tensors that do not fit the model.
    """
    warnings: list[str] = []
    header = read_gguf_header(file)
    config = gguf_config(header, file.name, lambda tensor: _checked_rope(tensor, file.name))
    warnings.extend(_compare_beside(file, config))
    architecture = architecture_of(config)
    tensors = _by_model_names(header.tensors, warnings)
    table = tensors.get(f"{EMBEDDING}.weight")
    if architecture.tied and f"{HEAD}.weight" not in tensors and table and table.type in blocks.INTEGER:
        # The head computes with the codes of the table, as any other layer does with its own.
        tensors[f"{HEAD}.weight"] = table
        config["tie_word_embeddings"] = False
    stored = {name: _stored(tensor) for name, tensor in tensors.items()}
    found = match_parameters(architecture, stored, (), tied=architecture.tied, where=file.name)
    unused = [name for name in tensors if name not in found]
    unknown, _ = drop_zero_biases(architecture, unused, lambda name: tensors[name].read())
    if unknown:
        warnings.append(f"tensors that no parameter of the model uses: {', '.join(unknown[:5])}")
    layers = {
        name: _layer(name, linear, tensors[f"{name}.weight"])
        for name, linear in architecture.linears.items()
        if f"{name}.weight" in tensors
    }
    quantized = {f"{name}.weight" for name, layer in layers.items() if layer.scheme is not None}
    template = header.metadata.get("tokenizer.chat_template")
    return GgufCheckpoint(
        path=given or file,
        format="gguf",
        config=config,
        layers=layers,
        floats=_floats(found, quantized, layers, tensors),
        warnings=warnings,
        tables={} if table is None else _tables(table),
        file=file,
        tensors=tensors,
        heads=_rotary_heads(config, architecture),
        chat_template=template if isinstance(template, str) else None,
    )


def _layer(name: str, linear: LinearShape, tensor: GgufTensor) -> LayerInfo:
    scheme, reason, refusal = None, "", None
    if tensor.type in blocks.INTEGER:
        scheme = blocks.INTEGER[tensor.type].scheme(linear.shape[1])
    elif blocks.is_float(tensor.type):
        pass
    elif blocks.can_dequantize(tensor.type, tensor.number):
        reason = f"dequantized: gguf type {tensor.type} is not codes times a scale"
    else:
        refusal = Refusal(name, f"gguf type {tensor.type}", _ACCEPTED, "convert the model to Q4_0 or Q4_K")
    storage, bias = f"gguf {tensor.type}", linear.bias
    shares = f"{EMBEDDING}.weight" if name == HEAD and tensor.name == _TABLE else ""
    return LayerInfo(
        name, linear.shape, storage, scheme, bias=bias, reason=reason, refusal=refusal, shares=shares
    )


def _tables(embedding: GgufTensor) -> dict[str, LayerInfo]:
    """The embedding, if one multiplication makes its values of its codes: there is nothing to round twice."""
    block = blocks.INTEGER.get(embedding.type)
    if block is None or block.zero is not Zero.SYMMETRIC:
        return {}
    rows, width = embedding.shape
    scheme = block.scheme(width)
    return {EMBEDDING: LayerInfo(EMBEDDING, (rows, width), f"gguf {embedding.type}", scheme)}


def _floats(
    found: dict[str, FloatInfo],
    quantized: set[str],
    layers: dict[str, LayerInfo],
    tensors: dict[str, GgufTensor],
) -> dict[str, FloatInfo]:
    floats = {}
    for name, info in found.items():
        if name in quantized:
            continue
        tensor = tensors[name]
        if blocks.can_dequantize(tensor.type, tensor.number):
            floats[name] = info
        elif name.removesuffix(".weight") not in layers:
            raise CheckpointError(
                "this tensor's type cannot be dequantized",
                where=name,
                found=f"gguf type {tensor.type}",
                accepted=_ACCEPTED,
            )
    return floats


def _stored(tensor: GgufTensor) -> FloatInfo:
    return FloatInfo(tensor.shape, blocks.float_dtype(tensor.type))


def _by_model_names(tensors: dict[str, GgufTensor], warnings: list[str]) -> dict[str, GgufTensor]:
    named = {}
    for name, tensor in tensors.items():
        ours = model_name(name)
        if ours is not None:
            named[ours] = tensor
        elif name not in _COMPUTED:
            warnings.append(f"the tensor {name} is of no known kind and is not used")
    return named


def _rotary_heads(config: dict[str, Any], architecture: Architecture) -> dict[str, int]:
    if config["model_type"] != "llama":
        return {}
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return {
        name: counts[leaf]
        for name in architecture.linears
        if name != HEAD and (leaf := name.rpartition(".")[2]) in counts
    }


def _compare_beside(file: Path, config: dict[str, Any]) -> list[str]:
    if not (file.parent / "config.json").exists():
        return []
    beside = read_json_object(path_inside(file.parent, "config.json", named_by=file.parent.name))
    return [f"{text}: the GGUF file decides" for text in differences(config, beside)]


def _checked_rope(tensor: GgufTensor, where: str) -> torch.Tensor:
    if tensor.type != "f32":
        raise CheckpointError(
            "rope_freqs.weight has an unexpected type", where=where, found=tensor.type, accepted="f32"
        )
    return blocks.float_rows(tensor.read(), tensor.type, tensor.number)


def _not_finite(layer: str, tensor: GgufTensor) -> CheckpointError:
    return CheckpointError(
        "there are scales that are no numbers",
        where=f"{layer}.weight ({tensor.name})",
        found="NaN or infinite",
        accepted="finite numbers",
        advice="the file is damaged, or its quantization failed",
    )
