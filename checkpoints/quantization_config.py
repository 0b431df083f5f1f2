"""Finding the quantization configuration in all the places where tools write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.folder import path_inside
from halfbyte.checkpoints.json_file import read_json_object
from halfbyte.errors import CheckpointError

# Files beside config.json, and the method one means when it does not say: AutoGPTQ wrote quantize_config.json
# and AutoAWQ quant_config.json before there was a quant_method.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": None,
    "hf_quant_config.json": "modelopt",
}
_SYNONYMS = {"bits": ("bits", "w_bit"), "group_size": ("group_size", "q_group_size"), "sym": ("sym",)}


@dataclass(frozen=True)
class QuantizationConfig:
    """A quantization configuration as found.

    Attributes:
        method: quant_method in lower case, e.g. ``gptq``.
        values: all of it.
        where: the file and key it was found at, for messages.
    """

    method: str
    values: dict[str, Any]
    where: str


def find_quantization_config(folder: Path, config: dict[str, Any]) -> QuantizationConfig | None:
    """Looks into config.json (three keys) and the files beside it.

    Args:
        folder: the model folder.
        config: its config.json.

    Raises:
        CheckpointError: two of them disagree in method, bits, group size, symmetry, activation order, rules
            or format, or one is malformed.
    """
    found = [_parse(values, where, None) for values, where in _inside(config)]
    for name, default in _FILES.items():
        if (folder / name).exists():
            values = read_json_object(path_inside(folder, name, named_by=folder.name))
            found.append(_parse(values, name, default))
    for other in found[1:]:
        _refuse_disagreement(found[0], other)
    return found[0] if found else None


def _inside(config: dict[str, Any]) -> list[tuple[Any, str]]:
    text = config.get("text_config")
    places = [
        (config.get("quantization_config"), "config.json, quantization_config"),
        (text.get("quantization_config") if isinstance(text, dict) else None, "config.json, text_config"),
        (config.get("compression_config"), "config.json, compression_config"),
    ]
    return [(values, where) for values, where in places if values is not None]


def _parse(values: Any, where: str, default: str | None) -> QuantizationConfig:
    if not isinstance(values, dict):
        raise CheckpointError(
            "the quantization configuration is no object", where=where, found=type(values).__name__
        )
    method = values.get("quant_method", values.get("method", default))
    if not isinstance(method, str) or not method:
        raise CheckpointError(
            "quant_method is missing or no text",
            where=where,
            found=repr(method)[:100],
            accepted='a name such as "gptq"',
        )
    return QuantizationConfig(method.lower(), values, where)


def _refuse_disagreement(first: QuantizationConfig, second: QuantizationConfig) -> None:
    ours, theirs = _essence(first), _essence(second)
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            raise CheckpointError(
                f"two quantization configurations disagree in {key}",
                where=f"{first.where} and {second.where}",
                found=f"{ours[key]!r} and {theirs[key]!r}"[:300],
                accepted="the same value in both",
                advice="remove the one that does not belong to these weights",
            )


def _essence(config: QuantizationConfig) -> dict[str, Any]:
    """What changes how tensors are read, by one name each; only what is said."""
    values = config.values
    essence: dict[str, Any] = {"quant_method": config.method}
    for key, names in _SYNONYMS.items():
        said = [values[name] for name in names if values.get(name) is not None]
        if said:
            essence[key] = said[0]
    for name in ("desc_act", "packing_format", "dynamic", "extra_config"):
        if values.get(name) is not None:
            essence[name] = values[name]
    layout = values.get("checkpoint_format", values.get("format"))
    if layout is not None:
        essence["format"] = layout
    return essence
