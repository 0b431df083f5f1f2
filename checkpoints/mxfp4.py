"""mxfp4 checkpoints, as gpt-oss was published: experts in ``blocks`` and ``scales``, all else in bfloat16.

Semantics: transformers' ``integrations/mxfp4.py``. The tensors of a block's experts are stacked
(``experts.gate_up_proj_blocks`` [E, 2I, H / 32, 16], ``experts.gate_up_proj_scales`` [E, 2I, H / 32]);
`stacked_tensors` takes them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.fp4_layer import Fp4Names, inspect_fp4
from halfbyte.checkpoints.layer_rules import Match, Rule, first_fit
from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.quantized_folder import QuantizedFolder, open_quantized
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.errors import CheckpointError

_NAMES = Fp4Names("blocks", "scales")


@dataclass(frozen=True)
class Mxfp4Reader:
    """Layers that have ``blocks``. Only experts are quantized, but those in `ignored`."""

    where: str
    ignored: tuple[Rule, ...]
    format: str = "mxfp4"
    weights: tuple[str, ...] = ("blocks",)

    def quantizes(self, layer: str) -> bool:
        return ".experts." in layer and first_fit(self.ignored, layer) is None

    def is_quantized(self, layer: str, tensors: SafetensorsFolder) -> bool:
        return f"{layer}.blocks" in tensors

    def inspect(
        self, name: str, shape: tuple[int, int], tensors: SafetensorsFolder, contradictions: Contradictions
    ) -> StoredLayer:
        return inspect_fp4(name, shape, "mxfp4", _NAMES, tensors)


def open_mxfp4(folder: ModelFolder) -> QuantizedFolder:
    """A folder with quant_method ``mxfp4``.

    Raises:
        CheckpointError: ``modules_to_not_convert`` is no list of names, or whatever is wrong with the tensors.
    """
    assert folder.quantization is not None
    where = folder.quantization.where
    said = folder.quantization.values.get("modules_to_not_convert")
    if said is not None and not (isinstance(said, list) and all(isinstance(name, str) for name in said)):
        raise CheckpointError(
            "modules_to_not_convert is impossible",
            where=where,
            found=repr(said)[:100],
            accepted="a list of names",
        )
    rules = tuple(
        Rule(match, name, None, where) for name in said or () for match in (Match.PREFIX, Match.SUFFIX)
    )
    return open_quantized(folder, Mxfp4Reader(where, rules))
