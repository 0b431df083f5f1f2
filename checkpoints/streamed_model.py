"""A checkpoint's float model that holds the weights of one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from halfbyte.checkpoints.architecture import meta_model
from halfbyte.checkpoints.checkpoint import Checkpoint
from halfbyte.checkpoints.model import fill_buffers, float_parameter, replace_parameters


def streamed_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    """`load_float_model`, to the bits, for models larger than the memory: every call reads all weights anew.

    A layer's weights are read and dequantized when it is called, and dropped behind it.

    Args:
        checkpoint: an opened checkpoint.
        dtype: of the parameters; weights are rounded to it once.

    Raises:
        CheckpointError: when it is called: a tensor with impossible values, or a layer that cannot be dequantized.
    """
    model = meta_model(checkpoint.config, dtype)
    fill_buffers(checkpoint, model)
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(value), name)
        for name, value in model.named_parameters(remove_duplicate=False)
    }
    for path, part in _parts(model):
        _stream(part, lambda name, path=path: float_parameter(checkpoint, model, names[f"{path}.{name}"]))
    return model.eval()


def last_hidden(checkpoint: Checkpoint, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [T, H]: what the model's head is given for these tokens, behind the last norm, computed in bfloat16."""
    model = streamed_model(checkpoint, torch.bfloat16)
    with torch.no_grad():
        ids = torch.tensor(list(tokens), dtype=torch.int64)[None]
        return torch.as_tensor(model.model(ids, use_cache=False).last_hidden_state[0]).float()


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """What is called one after the other: the layers one by one, and whatever stands beside them."""
    for path in ("model.", ""):
        for name, part in model.get_submodule(path.rstrip(".")).named_children():
            if isinstance(part, torch.nn.ModuleList):
                yield from ((f"{path}{name}.{number}", layer) for number, layer in part.named_children())
            elif path or name != "model":
                yield f"{path}{name}", part


def _stream(part: torch.nn.Module, read: Any) -> None:
    def fill(*_: object) -> None:
        replace_parameters(part, lambda name, meta: read(name).to(meta.dtype).contiguous())

    # Models look where their embedding lies before they call it, and send the tokens there.
    place = "cpu" if isinstance(part, torch.nn.Embedding) else "meta"

    def drop(*_: object) -> None:
        replace_parameters(part, lambda _, value: torch.empty_like(value, device=place))

    drop()
    part.register_forward_pre_hook(fill)
    part.register_forward_hook(drop)
