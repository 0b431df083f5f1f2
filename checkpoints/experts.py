"""Layers of experts as files have them: one linear per expert and projection.

transformers holds all experts of a block in two stacked parameters, ``gate_up_proj`` [E, 2I, H] (gate rows first) and
``down_proj`` [E, H, I], and the router as a bare weight. Files name each expert: ``experts.3.gate_proj``. Mixtral's
say ``block_sparse_moe`` for ``mlp``, and w1, w3, w2 for gate, up, down, unless llmcompressor wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# w1, w3, w2 are what Mixtral calls them, and what some writers of w4afp8 call the scales of their inputs.
OLDER_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKED = ("gate_up_proj", "down_proj")


def expert_linears(path: str, module: torch.nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and logical (N, K) of every linear that a module of stacked experts stands for; none if it is no such."""
    parts: list[Any] = [getattr(module, name, None) for name in _STACKED]
    if not all(isinstance(part, torch.nn.Parameter) and part.dim() == 3 for part in parts):
        return
    experts, hidden, inner = parts[1].shape
    for expert in range(experts):
        yield f"{path}.{expert}.gate_proj", (inner, hidden)
        yield f"{path}.{expert}.up_proj", (inner, hidden)
        yield f"{path}.{expert}.down_proj", (hidden, inner)


def router_shape(module: torch.nn.Module) -> tuple[int, int] | None:
    """Logical (N, K) of a router, which is no torch.nn.Linear; None if the module is something else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 2:
        return None
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        return None
    return weight.shape[0], weight.shape[1]


def names_in_file(stored: Iterable[str]) -> Callable[[str], str]:
    """From the model's names of layers and parameters to those of a file with the tensors `stored`."""
    found = list(stored)
    block = any(".block_sparse_moe." in name for name in found)
    leaves = any(".experts.0.w1." in name and not name.endswith(".input_scale") for name in found)

    def rename(name: str) -> str:
        if block:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if leaves and ".experts." in name:
            name = ".".join(OLDER_NAMES.get(part, part) for part in name.split("."))
        return name

    return rename
