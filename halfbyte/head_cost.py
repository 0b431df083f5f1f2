"""What rounding a model's head costs, measured on a sentence."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from halfbyte.checkpoints import Checkpoint
    from halfbyte.passes.scheme import Activations

_ROWS = 8192  # of the head at a time


def head_cost(own: Checkpoint, rounded: Checkpoint, activations: Activations, cache: bool) -> float:
    """The divergence of the next token, in nats, between a float head and a rounded one.

    Both are given the last hidden states of the float model, in bfloat16; the rounded one takes them as its
    activations have it. An earlier measurement of the same files is taken from the cache.

    Args:
        own: the checkpoint, its head in float.
        rounded: the same `with_head`.
        activations: what the rounded head does to its input.
        cache: look there, and keep the result there.

    Raises:
        CheckpointError: a tensor with impossible values, or a layer that cannot be dequantized.
    """
    from halfbyte.lowering.cache import keep

    if not cache:
        return _measured(own, rounded, activations)
    place = _place(own, activations)
    try:
        return float(json.loads(place.read_text(encoding="utf-8"))["kl"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    cost = _measured(own, rounded, activations)
    keep(place, json.dumps({"kl": cost}).encode())
    return cost


def _measured(own: Checkpoint, rounded: Checkpoint, activations: Activations) -> float:
    import torch
    from transformers import AutoConfig

    from halfbyte.checkpoints.quantized_head import float_head
    from halfbyte.checkpoints.streamed_model import last_hidden
    from halfbyte.divergence import divergence
    from halfbyte.lowering.final_logits import final_logits
    from halfbyte.passes.weight import QuantTensor

    head = float_head(own)
    assert head is not None
    config = AutoConfig.for_model(**own.config)
    hidden = last_hidden(own, _tokens(own, config))
    weight, codes = own.float_tensor(head.stored), rounded.quantized(head.name)
    assert isinstance(codes, QuantTensor)
    bias = own.float_tensor(f"{head.name}.bias").float() if head.bias else None

    def logits(given: torch.Tensor, parts: Iterator[torch.Tensor]) -> Any:
        columns = torch.cat([given @ part.T for part in parts], -1)
        columns = columns if bias is None else columns + bias
        model = SimpleNamespace(config=config, lm_head=lambda x: columns[None])
        return final_logits(model, given[None]).numpy()

    exact = logits(hidden, (part.float() for part in weight.split(_ROWS)))
    got = logits(
        _as_given(hidden, activations),
        (codes.rows(start, start + _ROWS).dequantize() for start in range(0, head.shape[0], _ROWS)),
    )
    cost = divergence(exact, got)
    return 0.0 if cost < 0 else cost  # NaN stays NaN


def _as_given(x: torch.Tensor, activations: Activations) -> torch.Tensor:
    """What the head computes with, of what it is given."""
    import torch

    from halfbyte.passes.ops.int8_roundings import int8_rounded
    from halfbyte.passes.scheme import Activations

    if not activations.is_int8:
        return x
    if activations is Activations.INT8:
        codes, scale = torch.ops.halfbyte.quantize_per_token(x)
        return codes.float() * scale[..., None]
    codes, scale, zero = int8_rounded(x, activations)
    return (codes.float() - zero[..., None]) * scale[..., None]


def _tokens(checkpoint: Checkpoint, config: Any) -> list[int]:
    from halfbyte.kept_tokenizer import save_tokenizer
    from halfbyte.sample_text import sample_tokens

    context = int(getattr(config, "max_position_embeddings", 2048))
    with tempfile.TemporaryDirectory(prefix="halfbyte-head-") as folder:
        warnings = list(checkpoint.warnings)
        written = save_tokenizer(checkpoint, Path(folder), cache=True)
        checkpoint.warnings[:] = warnings  # whoever writes the bundle says them
        return sample_tokens(Path(folder), bool(written), int(config.vocab_size), context)


def _place(checkpoint: Checkpoint, activations: Activations) -> Path:
    """Of the result in the cache: by the files' names, sizes and times, since reading them all takes longer."""
    from halfbyte.lowering.cache import cache_folder

    path = checkpoint.path.resolve()
    digest = hashlib.sha256(f"{path}\0{activations.value}\0".encode())
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\0".encode())
    for package in ("halfbyte", "torch", "transformers"):
        digest.update(f"{package} {version(package)}\0".encode())
    digest.update(Path(__file__).read_bytes())
    return cache_folder() / f"{digest.hexdigest()}.head.json"
