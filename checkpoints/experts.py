"""Layers of experts as files have them: one linear per expert and projection.

transformers holds all experts of a block in two stacked parameters, ``gate_up_proj`` [E, 2I, H] (gate rows first) and
``down_proj`` [E, H, I] (gpt-oss and Llama 4 the other way round, see `ExpertsShape`), and the router as a bare weight.
Files name each expert: ``experts.3.gate_proj``. Mixtral's say ``block_sparse_moe`` for ``mlp``, and w1, w3, w2 for
gate, up, down, unless llmcompressor wrote them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# w1, w3, w2 are what Mixtral calls them, and what some writers of w4afp8 call the scales of their inputs.
OLDER_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKED = ("gate_up_proj", "down_proj")
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


def is_of_expert(linear: str) -> bool:
    """Whether the linear of this name belongs to a routed expert."""
    return _OF_EXPERT.search(linear) is not None


@dataclass(frozen=True)
class ExpertsShape:
    """What a module of stacked experts holds.

    Attributes:
        experts: their number E.
        hidden: width H of the block's input and output.
        inner: width I between up and down.
        transposed: ``gate_up_proj`` is [E, H, 2I] and ``down_proj`` [E, I, H], as in gpt-oss and Llama 4.
        interleaved: gate and up take turns, as in gpt-oss.
        bias: ``gate_up_proj_bias`` [E, 2I] and ``down_proj_bias`` [E, H] are there.
        weighed: its only input is [E * T, H], the tokens once for each expert and weighed, as in Llama 4.
    """

    experts: int
    hidden: int
    inner: int
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    weighed: bool = False

    @classmethod
    def of(cls, module: torch.nn.Module) -> ExpertsShape | None:
        """None if the module is something else."""
        parts: list[Any] = [getattr(module, name, None) for name in _STACKED]
        if not all(isinstance(part, torch.nn.Parameter) and part.dim() == 3 for part in parts):
            return None
        (experts, outputs, inputs), (_, hidden, inner) = (part.shape for part in parts)
        transposed = (outputs, inputs) != (2 * inner, hidden)
        if transposed:
            hidden, inner = inner, hidden
        interleaved = not getattr(module, "is_concatenated", True)
        bias = isinstance(getattr(module, "gate_up_proj_bias", None), torch.nn.Parameter)
        weighed = len(inspect.signature(module.forward).parameters) == 1
        return cls(experts, hidden, inner, transposed, interleaved, bias, weighed)

    def linears(self, path: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Name and logical (N, K) of every linear that the module at ``path`` stands for."""
        for expert in range(self.experts):
            yield f"{path}.{expert}.gate_proj", (self.inner, self.hidden)
            yield f"{path}.{expert}.up_proj", (self.inner, self.hidden)
            yield f"{path}.{expert}.down_proj", (self.hidden, self.inner)

    def stack(self, leaf: str, read: Callable[[int, str], torch.Tensor]) -> torch.Tensor:
        """One of the module's parameters out of the tensors of single linears.

        Args:
            leaf: the parameter's name.
            read: gives weight or bias of an expert's ``gate_proj``, ``up_proj`` or ``down_proj``.
        """

        def one(expert: int) -> torch.Tensor:
            if leaf.startswith("down_proj"):
                made = read(expert, "down_proj")
            else:
                both = [read(expert, "gate_proj"), read(expert, "up_proj")]
                made = torch.stack(both, 1).flatten(0, 1) if self.interleaved else torch.cat(both)
            return made.T if self.transposed and made.dim() == 2 else made

        return torch.stack([one(expert) for expert in range(self.experts)])


def router_shape(module: torch.nn.Module) -> tuple[int, int] | None:
    """Logical (N, K) of a router, which is no torch.nn.Linear; None if the module is something else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 2:
        return None
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        return None
    return weight.shape[0], weight.shape[1]
