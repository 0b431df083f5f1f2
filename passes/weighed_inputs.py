"""`WeighedInputs`: Llama 4's block of experts, whose inputs are weighed and not their results."""

from __future__ import annotations

import torch


class WeighedInputs(torch.nn.Module):
    """What transformers' ``Llama4TextMoe`` computes, without passing all tokens through all experts.

    The scores are the sigmoids of the largest logits; each multiplies the input of its expert. Results are added
    unweighed, the shared expert's first. The parts keep their names.

    Args:
        router: gives logits [T, E]; an nn.Linear, also one whose own forward gives more, or a quantized linear.
        experts: of one of the modules that stand for transformers' experts.
        shared: the shared expert.
        chosen: experts of a token.
    """

    def __init__(
        self, router: torch.nn.Module, experts: torch.nn.Module, shared: torch.nn.Module, chosen: int
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared_expert, self.chosen = router, experts, shared, chosen

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = (
            torch.nn.Linear.forward(self.router, x)
            if isinstance(self.router, torch.nn.Linear)
            else self.router(x)
        )
        largest, ids = torch.topk(logits, self.chosen, dim=1)
        scores = torch.sigmoid(largest.float()).to(x.dtype)
        rows = (x[:, None] * scores[..., None]).flatten(0, 1)
        each = ids.reshape(-1, 1)
        out = self.experts(rows, each, torch.ones_like(each, dtype=torch.float32))
        return self.shared_expert(x) + out.unflatten(0, (-1, self.chosen)).sum(1), logits
