"""What a checkpoint holds and what compile would do with it, from headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.choose_head import measured_head
from halfbyte.latent_caches import keeps_latents
from halfbyte.layer_activations import LayerActivations
from halfbyte.parameter_count import ParameterCount, count_parameters

if TYPE_CHECKING:
    from halfbyte.checkpoints import LayerInfo


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer.

    Attributes:
        name: module path.
        shape: logical (N, K).
        storage: the format on disk.
        scheme: how it is quantized, or ``float``.
        group_size: inputs per scale; K when channelwise; None for float.
        activations: ``int8`` (or another of its roundings), ``fp8``, ``none`` or ``float``, under the options given.
        plan: what compile would do with it.
    """

    name: str
    shape: tuple[int, int]
    storage: str
    scheme: str
    group_size: int | None
    activations: str
    plan: str


@dataclass(frozen=True)
class LayerGroup:
    """Layers that differ in nothing but the numbers in their names."""

    pattern: str
    count: int
    example: LayerPlan


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        path: the checkpoint.
        format: its format.
        architecture: the model's family.
        config: main numbers of the model's configuration.
        layers: every linear layer.
        parameters: how many there are, and how many a token meets.
        warnings: contradictions and assumptions.
    """

    path: str
    format: str
    architecture: str
    config: dict[str, Any]
    layers: tuple[LayerPlan, ...]
    parameters: ParameterCount
    warnings: tuple[str, ...] = field(default=())

    @property
    def groups(self) -> list[LayerGroup]:
        return group_layers(self.layers)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_CONFIG = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)


_MEASURED = "int8 if that is measured to cost little, else float (--lm-head)"
_INPUT = {
    "int8": "int8 activations per token",
    "int8_affine": "int8 activations per token with zero points",
    "int8_affine_f32": "int8 activations per token with zero points",
    "int8_affine_f64": "int8 activations per token with zero points",
    "int8_symmetric": "int8 activations per token, absmax / 127.5",
    "int8_fixed": "int8 activations with a scale of the checkpoint",
    "fp8": "e4m3 activations per token",
    "none": "float activations, digit planes",
}
_INPUT_OF_FP8 = {
    "fp8": "e4m3 activations per token and block of inputs",
    "none": "float activations",
}


def inspect(
    model: str | Path,
    *,
    activations: str = "auto",
    layers: Sequence[str] = (),
    on_unsupported: str = "error",
    latent_cache: str = "auto",
) -> Inspection:
    """Reads the headers of a checkpoint and says, per layer, what it is and what compile would make of it.

    Whether packed layers are symmetric is told from the zero points of a few of their groups; compile looks at all.

    Args:
        model: a Hugging Face folder or a .gguf file.
        activations: as for compile: ``auto``, ``int8``, ``fp8`` or ``none``.
        layers: as for compile: PATTERN=KIND.
        on_unsupported: as for compile: ``error`` or ``float``.
        latent_cache: as for compile: ``auto``, ``on`` or ``off``.

    Raises:
        CheckpointError: the checkpoint is unreadable, malformed or of an unknown format.
        UsageError: ``latent_cache`` does not fit the model, or an entry of ``layers`` is malformed, or about no
            quantized layer.
    """
    from halfbyte.checkpoints import open_checkpoint
    from halfbyte.checkpoints.latent_layers import with_latents

    choice = LayerActivations.of({"activations": activations, "layers": layers})
    checkpoint = open_checkpoint(Path(model), glance=True)
    if keeps_latents(checkpoint, latent_cache):
        checkpoint = with_latents(checkpoint)
    choice.check_patterns(checkpoint.layers.values())
    plans = tuple(_plan(layer, choice, on_unsupported) for layer in checkpoint.layers.values())
    config = {key: checkpoint.config[key] for key in _CONFIG if key in checkpoint.config}
    if any(layer.shares for layer in checkpoint.layers.values()):
        config["tie_word_embeddings"] = True  # in the file; the compiled head has codes of its own
    if (head := measured_head(checkpoint)) is not None:
        plans = tuple(replace(plan, plan=_MEASURED) if plan.name == head else plan for plan in plans)
    family = str(checkpoint.config.get("model_type", "unknown"))
    count = count_parameters(checkpoint)
    return Inspection(str(model), checkpoint.format, family, config, plans, count, tuple(checkpoint.warnings))


def _plan(layer: LayerInfo, choice: LayerActivations, on_unsupported: str) -> LayerPlan:
    from halfbyte.passes.scheme import Fp8Scheme, mode_name

    if layer.scheme is not None:
        activations = choice.choose(layer)
        words = _INPUT[activations.value]
        if isinstance(layer.scheme, Fp8Scheme):
            words = _INPUT_OF_FP8[activations.value]
        plan = f"{mode_name(layer.scheme, activations)}: {words}"
        if (refused := choice.refused(layer)) is not None:
            plan = f"refused: {refused.found}" if on_unsupported == "error" else f"{plan} ({refused.found})"
        group, scheme = layer.scheme.group_size, str(layer.scheme)
        return LayerPlan(layer.name, layer.shape, layer.storage, scheme, group, activations.value, plan)
    plan = "float"
    if layer.refusal is not None:
        verb = "refused" if on_unsupported == "error" else "float"
        plan = f"{verb}: {layer.refusal.found}"
    elif layer.reason:
        plan = f"float: {layer.reason}"
    return LayerPlan(layer.name, layer.shape, layer.storage, "float", None, "float", plan)


def group_layers(layers: Iterable[LayerPlan]) -> list[LayerGroup]:
    """Groups layers under patterns such as ``model.layers.*.mlp.down_proj``, in order of appearance."""
    groups: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer.name)
        plan = layer.plan.replace(layer.name, pattern)
        key = (pattern, layer.shape, layer.storage, layer.scheme, layer.activations, plan)
        groups.setdefault(key, []).append(layer)
    return [
        LayerGroup(str(key[0]) if len(members) > 1 else members[0].name, len(members), members[0])
        for key, members in groups.items()
    ]
