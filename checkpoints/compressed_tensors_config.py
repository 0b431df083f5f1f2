"""What a compressed-tensors configuration says about each layer.

Semantics: vllm-project/compressed-tensors, ``quantization/quant_config.py`` and ``quant_args.py``. ``ignore`` is
looked at first; a target that names a layer goes before an expression (``re:``, from the start of the name), and
that before a class. Names of modules that engines fuse (``qkv_proj``, ``gate_up_proj``) mean their members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoints.compressed_tensors_args import QuantizationArgs, quantization_args
from halfbyte.checkpoints.layer_rules import Match, Rule
from halfbyte.checkpoints.quantization_config import QuantizationConfig
from halfbyte.errors import CheckpointError

FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_ORDER = (Match.EXACT, Match.START, Match.CLASS)
_ONLINE = "weight"  # transforms of weights are in the weights; those elsewhere are computed at run time


@dataclass(frozen=True)
class Group:
    """One of ``config_groups``.

    Attributes:
        name: e.g. ``group_0``.
        weights: how weights are quantized; None when they are not.
        inputs: how the layer quantizes its input; None when it does not.
        outputs: whether its output is quantized.
        format: of this group, or of all.
    """

    name: str
    weights: QuantizationArgs | None
    inputs: QuantizationArgs | None
    outputs: bool
    format: str | None


@dataclass(frozen=True)
class CompressedTensorsConfig:
    """A checked configuration.

    Attributes:
        format: in words.
        where: where it was found.
        ignored: layers that stay in float.
        targets: rules and their groups, in the order they are tried.
        notes: what is said for the whole model and not done.
    """

    format: str
    where: str
    ignored: tuple[Rule, ...]
    targets: tuple[tuple[Rule, Group], ...]
    notes: tuple[str, ...]

    def setting(self, layer: str) -> Group | None:
        """The group of `layer`; None when it is to stay in float.

        Raises:
            CheckpointError: a bad pattern.
        """
        names = _names(layer)
        if any(rule.fits(name) for rule in self.ignored for name in names):
            return None
        found = next((group for rule, group in self.targets if any(map(rule.fits, names))), None)
        return None if found is None or found.weights is None else found

    @property
    def default(self) -> Group | None:
        """The first group with quantized weights."""
        return next((group for _, group in self.targets if group.weights is not None), None)


def compressed_tensors_config(found: QuantizationConfig) -> CompressedTensorsConfig:
    """Checks a configuration with quant_method ``compressed-tensors``.

    Raises:
        CheckpointError: a format this reader does not know, transforms at run time, or values of a wrong type.
    """
    values, where = found.values, found.where
    kind = _format(values, where)
    _refuse_sparsity(values, where)
    _refuse_transforms(values, where)
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(
            "config_groups is missing or empty",
            where=where,
            found=type(groups).__name__,
            accepted="an object with a group for each scheme",
        )
    targets: list[tuple[Rule, Group]] = []
    for name, group in groups.items():
        targets += _group(str(name)[:100], group, kind, where)
    targets.sort(key=lambda target: _ORDER.index(target[0].match))
    ignored = tuple(rule for text in _texts(values, "ignore", where) for rule in _rules(text, where))
    label = f"compressed-tensors {kind}" if kind else "compressed-tensors"
    return CompressedTensorsConfig(label, where, ignored, tuple(targets), _notes(values, where))


def _group(name: str, values: Any, kind: str | None, where: str) -> list[tuple[Rule, Group]]:
    place = f"{where}, {name}"
    if not isinstance(values, dict):
        raise CheckpointError("the group is no object", where=place, found=type(values).__name__)
    group = Group(
        name,
        quantization_args(values.get("weights"), f"{place}, weights"),
        quantization_args(values.get("input_activations"), f"{place}, input_activations"),
        quantization_args(values.get("output_activations"), f"{place}, output_activations") is not None,
        _format(values, place) or kind,
    )
    return [(rule, group) for text in _texts(values, "targets", place) for rule in _rules(text, place)]


def _names(layer: str) -> tuple[str, ...]:
    """The layer's own name, and that of the module it is fused into elsewhere."""
    parent, _, leaf = layer.rpartition(".")
    return (layer, f"{parent}.{_FUSED[leaf]}") if leaf in _FUSED else (layer,)


def _rules(text: str, where: str) -> list[Rule]:
    if text.startswith("re:"):
        return [Rule(Match.START, text[3:], {}, where)]
    return [Rule(match, text, {}, where) for match in (Match.EXACT, Match.CLASS)]


def _format(values: dict[str, Any], where: str) -> str | None:
    kind = values.get("format")
    if kind is not None and kind not in FORMATS:
        raise CheckpointError(
            "the format is not one this version reads",
            where=where,
            found=repr(kind)[:100],
            accepted=", ".join(FORMATS),
        )
    return kind


def _texts(values: dict[str, Any], key: str, where: str) -> list[str]:
    found = values.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise CheckpointError(f"{key} is no list of names", where=where, found=repr(found)[:200])
    return found


def _refuse_sparsity(values: dict[str, Any], where: str) -> None:
    sparsity = values.get("sparsity_config")
    if sparsity in (None, {}) or (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        return
    found = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    raise CheckpointError(
        "weights that are stored sparse cannot be read",
        where=f"{where}, sparsity_config",
        found=repr(found)[:100],
        accepted="dense",
    )


def _refuse_transforms(values: dict[str, Any], where: str) -> None:
    """Refuses rotations of activations: without them the model would compute something else."""
    transforms = values.get("transform_config")
    if transforms in (None, {}):
        return
    groups = transforms.get("config_groups", {}) if isinstance(transforms, dict) else None
    places: list[Any] = []
    for scheme in groups.values() if isinstance(groups, dict) else [None]:
        applied = scheme.get("apply", []) if isinstance(scheme, dict) else None
        for one in applied if isinstance(applied, list) else [None]:
            places.append(one.get("location") if isinstance(one, dict) else None)
    online = [place for place in places if not isinstance(place, str) or not place.startswith(_ONLINE)]
    if online:
        raise CheckpointError(
            "transforms of activations are not computed",
            where=f"{where}, transform_config",
            found=repr(online[0])[:100],
            accepted="transforms of weights alone (weight_input, weight_output)",
            advice="quantize the model without online rotations",
        )


def _notes(values: dict[str, Any], where: str) -> tuple[str, ...]:
    if values.get("kv_cache_scheme") in (None, {}):
        return ()
    return (f"{where} asks for quantized key and value caches: they are of --kv-cache here",)
