"""Modules of experts that no one kernel computes: of several schemes, or in float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from halfbyte.passes.fp8_experts import Fp8Experts
from halfbyte.passes.ops.swiglu import OAI_SLOPE
from halfbyte.passes.quant_experts import QuantExperts


def product(gate: torch.Tensor, up: torch.Tensor, glu: str, limit: float) -> torch.Tensor:
    """What ``passes/ops/swiglu.py`` defines, by torch's own operations."""
    if glu == "oai":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * OAI_SLOPE) * (up + 1)
    return torch.nn.functional.silu(gate) * up


class SingleExpert(torch.nn.Module):
    """One expert as three linears of any kind: float, integer or e4m3."""

    def __init__(
        self, gate: torch.nn.Module, up: torch.nn.Module, down: torch.nn.Module, glu: str, limit: float
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.glu, self.limit = glu, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(product(self.gate_proj(x), self.up_proj(x), self.glu, self.limit))
        return out


class MixedExperts(torch.nn.Module):
    """Experts of a block whose schemes differ: those alike by one operator for each kind, the others one by one.

    An expert by itself computes all tokens, and its result counts where a token was sent to it.

    Args:
        experts: their number E.
        alike: modules of experts, each with the numbers that its experts have in the block.
        single: the others, by number.
    """

    def __init__(
        self,
        experts: int,
        alike: Sequence[tuple[QuantExperts | Fp8Experts, Sequence[int]]],
        single: Mapping[int, SingleExpert],
    ) -> None:
        super().__init__()
        self.single = sorted(single)
        for number, expert in single.items():
            self.add_module(str(number), expert)
        self.alike = len(alike)
        for index, (module, numbers) in enumerate(alike):
            self.add_module(f"alike{index}", module)
            places = torch.full((experts,), -1)
            places[list(numbers)] = torch.arange(len(numbers))
            self.register_buffer(f"places{index}", places, persistent=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for index in range(self.alike):
            ids = getattr(self, f"places{index}")[top_k_index]
            total = total + self.get_submodule(f"alike{index}")(hidden_states, ids, top_k_weights).float()
        for number in self.single:
            sent = top_k_index == number
            factor = torch.where(sent, top_k_weights.float(), 0.0).sum(-1, keepdim=True)
            out = self.get_submodule(str(number))(hidden_states).float() * factor
            total = total + torch.where(sent.any(-1, keepdim=True), out, 0.0)
        return total.to(hidden_states.dtype)


class FloatExperts(torch.nn.Module):
    """Experts in float, all of them on all tokens: a token's own count.

    Args:
        stacked: transformers' parameters, by their names; [E, 2I, H] and [E, H, I], the other way round if
            ``transposed``, and biases [E, 2I] and [E, H] if there are any.
        transposed, interleaved: how they are laid out; ``interleaved`` if gate and up take turns.
        glu, limit: the product of gate and up.
    """

    def __init__(
        self,
        stacked: Mapping[str, torch.nn.Parameter],
        *,
        transposed: bool,
        interleaved: bool,
        glu: str,
        limit: float,
    ) -> None:
        super().__init__()
        for name, value in stacked.items():
            self.register_parameter(name, value)
        self.experts = stacked["down_proj"].shape[0]
        self.transposed, self.is_concatenated, self.glu, self.limit = transposed, not interleaved, glu, limit

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        experts = self.experts
        both = self._linear("gate_up_proj", hidden_states.expand(experts, *hidden_states.shape))
        gate, up = both.chunk(2, -1) if self.is_concatenated else (both[..., 0::2], both[..., 1::2])
        out = self._linear("down_proj", product(gate, up, self.glu, self.limit))
        sent = top_k_index == torch.arange(experts)[:, None, None]
        factors = torch.where(sent, top_k_weights, 0.0).sum(-1, keepdim=True)
        return torch.where(sent.any(-1, keepdim=True), out * factors, 0.0).sum(0).to(hidden_states.dtype)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        out = torch.bmm(x, weight if self.transposed else weight.transpose(1, 2))
        return out if bias is None else out + bias[:, None]
