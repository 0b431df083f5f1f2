"""AWQ checkpoints (version gemm): what their configuration says about each layer.

Semantics: AutoAWQ's quant_config.json and transformers' AwqConfig. A name in ``modules_to_not_convert`` is
compared by whole dotted parts, so that ``layers.5`` does not mean layer 50.
"""

from __future__ import annotations

from typing import Any

from halfbyte.checkpoints.awq_packing import AwqPacking
from halfbyte.checkpoints.config_values import accept, flag, names
from halfbyte.checkpoints.layer_rules import Match, Rule
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.names_in_file import is_head
from halfbyte.checkpoints.packed_config import PackedConfig, layer_setting
from halfbyte.checkpoints.packed_reader import open_packed
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.checkpoints.quantized_folder import QuantizedFolder
from halfbyte.errors import CheckpointError

# Layouts of other kernels; none keeps the words of gemm.
_OTHER = ("gemv", "gemv_fast", "exllama", "marlin", "ipex", "llm-awq")


def open_awq(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``awq``."""
    assert folder.quantization is not None
    return open_packed(folder, awq_config(folder.quantization))


def awq_config(found: QuantizationConfig) -> PackedConfig:
    """Checks a configuration with quant_method ``awq``, in AutoAWQ's words (w_bit) or transformers' (bits).

    Raises:
        CheckpointError: another version, or values of a wrong type.
    """
    values, where = found.values, found.where
    _check_version(values, where)
    skipped = names(values, "modules_to_not_convert", where)
    rules = tuple(Rule(Match.PARTS, name, None, where) for name in skipped)
    return PackedConfig(
        (AwqPacking(),),
        "awq gemm",
        where,
        layer_setting(_common_words(values, where), where),
        rules,
        lambda layer: not is_head(layer),
    )


def _check_version(values: dict[str, Any], where: str) -> None:
    for key in ("version", "format", "checkpoint_format"):
        version = values.get(key, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            known = isinstance(version, str) and version.lower() in _OTHER
            raise CheckpointError(
                f"AWQ tensors of {'another layout' if known else 'an unknown layout'} cannot be read",
                where=where,
                found=f"{key} {version!r}"[:100],
                accepted='version "gemm"',
                advice="use the checkpoint of version gemm, or quantize the model to that version",
            )
    accept(values.get("backend", "autoawq"), ("autoawq",), "backend", where)


def _common_words(values: dict[str, Any], where: str) -> dict[str, Any]:
    bits, group_size = (
        values.get("bits", values.get("w_bit")),
        values.get("group_size", values.get("q_group_size")),
    )
    zero_point, sym = flag(values, "zero_point", where), flag(values, "sym", where)
    if zero_point is not None and sym is not None and zero_point == sym:
        raise CheckpointError(
            "zero_point and sym contradict each other", where=where, found=f"both are {str(sym).lower()}"
        )
    said = sym if zero_point is None else not zero_point
    return {"bits": bits, "group_size": group_size, "sym": said}
