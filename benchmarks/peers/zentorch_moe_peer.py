"""AMD's zentorch: its fused layer of experts, int4 weights with int8 dynamic activations, bfloat16 in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import zentorch  # noqa: F401  registers torch.ops.zentorch

from peers.moe_problem import Array, MoeProblem


class ZentorchMoe:
    """Packed words [E, N, K / 8] and scales [E, K / group, N]; gate's rows before up's."""

    def build(self, problem: MoeProblem) -> None:
        torch.set_num_threads(problem.threads)
        torch.set_grad_enabled(False)
        self.up = self._stacked(problem, "gate", "up")
        self.down = self._stacked(problem, "down")

    def _stacked(self, problem: MoeProblem, *parts: str) -> tuple[torch.Tensor, torch.Tensor]:
        words, scales = [], []
        for expert in range(problem.experts):
            weights = [problem.weight(expert, part) for part in parts]
            codes = np.concatenate([codes for codes, _ in weights]).astype(np.int8) - 8
            words.append(torch.ops.zentorch.zentorch_woq_repack_weight(torch.from_numpy(codes)))
            scales.append(torch.from_numpy(np.concatenate([scale for _, scale in weights]).T.copy()))
        return torch.stack(words), torch.stack(scales)

    def call(self, x: Array, logits: Array, ids: Array, factors: Array) -> Callable[[], Any]:
        rows, numbers = torch.from_numpy(x).bfloat16(), torch.from_numpy(ids.astype(np.int32))
        weights, out = torch.from_numpy(factors), torch.empty(x.shape, dtype=torch.bfloat16)
        given = (rows, self.up[0], self.down[0], None, None, weights, numbers, False, "silu")

        def call() -> torch.Tensor:
            torch.ops.zentorch.zentorch_fused_moe(out, *given, self.up[1], self.down[1])
            return out

        return call

    def result(self, returned: Any) -> Array:
        return np.asarray(returned.float().numpy())
