"""Which stored tensor fills which float parameter of the model, and what to say when they do not fit."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from halfbyte.checkpoints.architecture import Architecture
from halfbyte.checkpoints.checkpoint import FloatInfo
from halfbyte.errors import CheckpointError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_SEARCHED = 5000


def settle_tied_head(
    config: dict[str, Any],
    architecture: Architecture,
    *,
    quantized: bool,
    stored: Mapping[str, FloatInfo],
    read: Callable[[str], torch.Tensor],
    warnings: list[str],
) -> bool:
    """Whether lm_head shares the embedding's weight, after a look at what the file holds.

    A tied configuration beside a head in the file that differs from the embedding means that head: then
    ``config["tie_word_embeddings"]`` becomes False, with a warning. An equal head stays tied.

    Args:
        quantized: the file holds a quantized lm_head.
        stored: the float tensors of the file.
        read: reads one of them.
    """
    if not architecture.tied:
        return False
    weight, embedding = f"{architecture.head}.weight", f"{architecture.embedding}.weight"
    if not quantized and weight not in stored:
        return True
    if not quantized and _equal(read(weight), read(embedding) if embedding in stored else None):
        return True
    config["tie_word_embeddings"] = False
    found = "a quantized lm_head" if quantized else "an lm_head.weight that differs from the embedding"
    warnings.append(
        f"config.json says tie_word_embeddings, but the file holds {found}: the file's lm_head is used"
    )
    return False


def match_parameters(
    architecture: Architecture,
    stored: Mapping[str, FloatInfo],
    provided: Iterable[str],
    *,
    tied: bool,
    where: str,
) -> dict[str, FloatInfo]:
    """The stored tensor of every float parameter of the model, in model order.

    Args:
        stored: the tensors of the file by the model's names.
        provided: parameters that come from elsewhere: the weights of quantized layers.
        tied: lm_head has no weight of its own.
        where: the checkpoint, for errors.

    Raises:
        CheckpointError: a parameter without a tensor (with the nearest names there are), or a tensor of
            another shape or of no float type.
    """
    elsewhere = set(provided)
    found = {}
    missing = []
    for name, shape in architecture.parameters.items():
        if name in elsewhere or (tied and name == f"{architecture.head}.weight" and name not in stored):
            continue
        info = stored.get(name)
        if info is None:
            missing.append(name)
            continue
        if info.shape != shape or info.dtype not in _FLOATS:
            raise CheckpointError(
                "the tensor does not fit the model",
                where=name,
                found=f"{_name(info.dtype)} {list(info.shape)}",
                accepted=f"a float tensor {list(shape)}",
                advice="config.json and the weights are of different models, or the file is damaged",
            )
        found[name] = info
    if missing:
        raise missing_tensor(missing, stored, where)
    return found


def missing_tensor(missing: list[str], present: Iterable[str], where: str) -> CheckpointError:
    """The error for tensors the model needs and the file lacks; shows the nearest names there are."""
    near = nearest_names(missing[0], present)
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return CheckpointError(
        f"the tensor {missing[0]} is missing{more}",
        where=where,
        found=f"nearest names: {', '.join(near)}" if near else "no tensor",
        accepted=missing[0],
        advice="fetch the whole checkpoint; if the names have an additional prefix, rename the tensors",
    )


def nearest_names(wanted: str, present: Iterable[str], count: int = 3) -> list[str]:
    """The `count` names most like `wanted`: by how many dotted parts agree from the end, then by text."""
    parts = wanted.split(".")[::-1]

    def likeness(name: str) -> tuple[int, float]:
        agreeing = 0
        for ours, theirs in zip(parts, name.split(".")[::-1], strict=False):
            if ours != theirs:
                break
            agreeing += 1
        return agreeing, difflib.SequenceMatcher(None, wanted, name[:500]).ratio()

    searched = [name for _, name in zip(range(_MAX_SEARCHED), present, strict=False)]
    return [name[:200] for name in sorted(searched, key=likeness, reverse=True)[:count]]


def drop_zero_biases(
    architecture: Architecture, unused: list[str], read: Callable[[str], torch.Tensor]
) -> tuple[list[str], list[str]]:
    """Splits unused tensors into (unknown ones, zero biases). AutoGPTQ writes zero biases for every layer.

    Raises:
        CheckpointError: a bias that is not zero beside a layer that has none in the model: without it the
            model would compute something else.
    """
    unknown, zero = [], []
    for name in unused:
        layer = architecture.linears.get(name.removesuffix(".bias")) if name.endswith(".bias") else None
        if layer is None:
            unknown.append(name)
        elif not torch.any(read(name)):
            zero.append(name)
        else:
            raise CheckpointError(
                "the file holds a bias, but the layer has none in this model",
                where=name,
                found="a bias that is not zero",
                accepted="no bias, or zeros",
                advice="check attention_bias and mlp_bias in config.json",
            )
    return unknown, zero


def _equal(head: torch.Tensor, embedding: torch.Tensor | None) -> bool:
    if embedding is None or head.shape != embedding.shape:
        return False
    # In blocks of rows: both can have half a gigabyte, and an early difference ends the comparison.
    return all(
        torch.equal(ours.float(), theirs.float())
        for ours, theirs in zip(head.split(4096), embedding.split(4096), strict=True)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
