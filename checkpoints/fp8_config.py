"""What the configurations of ``fp8`` and ``w4afp8`` checkpoints say.

Semantics: DeepSeek's config.json (``weight_block_size``), transformers' FineGrainedFP8Config
(``modules_to_not_convert``) and vLLM's and SGLang's W4AFp8Config (``ignored_layers``, ``group_size``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoints.layer_rules import Match, Rule, first_fit
from halfbyte.checkpoints.names_in_file import is_head
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.checkpoints.scale_blocks import ScaleBlocks, block_sizes
from halfbyte.errors import CheckpointError

STATIC = "static input scales are not used, inputs are quantized when the model runs"


@dataclass(frozen=True)
class Fp8Config:
    """A checked configuration.

    Attributes:
        where: where it was found.
        block: (outputs, inputs) that share a scale; None for one scale per tensor.
        group_size: inputs that share a scale of int4 weights.
        ignored: layers that stay in float.
        notes: what is said for the whole model and not done.
    """

    where: str
    block: tuple[int, int] | None
    group_size: int
    ignored: tuple[Rule, ...]
    notes: tuple[str, ...]

    def quantizes(self, layer: str) -> bool:
        """Whether the layer is to be quantized; lm_head only if its tensors say so."""
        return not is_head(layer) and first_fit(self.ignored, layer) is None

    def blocks(self, shape: tuple[int, int]) -> ScaleBlocks:
        """What shares a scale in an e4m3 weight [N, K]."""
        if self.block is None:
            return ScaleBlocks.of("tensor", shape)
        return ScaleBlocks.of("block", shape, *self.block)


def fp8_config(found: QuantizationConfig) -> Fp8Config:
    """Checks a configuration with quant_method ``fp8`` or ``w4afp8``.

    Raises:
        CheckpointError: another kind of fp8, or values of a wrong type.
    """
    values, where = found.values, found.where
    kind = values.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _impossible("fmt", kind, where, "e4m3")
    scheme = values.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _impossible("activation_scheme", scheme, where, "dynamic or static")
    group_size = values.get("group_size", 128)
    if type(group_size) is not int or group_size < 1:
        raise _impossible("group_size", group_size, where, "a positive integer")
    notes = []
    if values.get("scale_fmt") not in (None, "float"):
        notes.append(
            f"{where} says scale_fmt = {values['scale_fmt']!r}: here scales of activations are not rounded"[
                :300
            ]
        )
    ignored = [*_names(values, "modules_to_not_convert", where), *_names(values, "ignored_layers", where)]
    rules = tuple(
        Rule(match, name, None, where) for name in ignored for match in (Match.PREFIX, Match.SUFFIX)
    )
    block = values.get("weight_block_size")
    if block is not None:
        block = block_sizes(block, "weight_block_size", where)
    return Fp8Config(where, block, group_size, rules, tuple(notes))


def _names(values: dict[str, Any], key: str, where: str) -> list[str]:
    found = values.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _impossible(key, found, where, "a list of names")
    return found


def _impossible(key: str, value: Any, where: str, accepted: str) -> CheckpointError:
    return CheckpointError(f"{key} is impossible", where=where, found=repr(value)[:100], accepted=accepted)
