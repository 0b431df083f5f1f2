"""Runs a checkpoint's float model with one decoder layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from halfbyte.checkpoints.architecture import meta_model
from halfbyte.checkpoints.checkpoint import Checkpoint
from halfbyte.checkpoints.model import fill_buffers, float_parameter, replace_parameters


def last_hidden(checkpoint: Checkpoint, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [T, H]: what the model's head is given for these tokens, behind the last norm.

    Weights are dequantized and rounded to bfloat16, each layer's when it is reached, and dropped behind it.

    Raises:
        CheckpointError: a tensor with impossible values, or a layer that cannot be dequantized.
    """
    model = meta_model(checkpoint.config, torch.bfloat16)
    fill_buffers(checkpoint, model)
    for path, part in _parts(model.model):
        _stream(checkpoint, model, f"model.{path}", part)
    with torch.no_grad():
        ids = torch.tensor(list(tokens), dtype=torch.int64)[None]
        return torch.as_tensor(model.model(ids, use_cache=False).last_hidden_state[0]).float()


def _parts(decoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """What is called one after the other: the layers one by one, and whatever stands beside them."""
    for name, part in decoder.named_children():
        if isinstance(part, torch.nn.ModuleList):
            yield from ((f"{name}.{number}", layer) for number, layer in part.named_children())
        else:
            yield name, part


def _stream(checkpoint: Checkpoint, model: Any, path: str, part: torch.nn.Module) -> None:
    def fill(*_: object) -> None:
        replace_parameters(
            part,
            lambda name, meta: (
                float_parameter(checkpoint, model, f"{path}.{name}").to(meta.dtype).contiguous()
            ),
        )

    def drop(*_: object) -> None:
        replace_parameters(part, lambda _, value: torch.empty_like(value, device="meta"))

    part.register_forward_pre_hook(fill)
    part.register_forward_hook(drop)
