"""PyTorch: dense products, int8 by torch._int_mm, and the int4 kernel that torchao uses on CPUs.

Nothing to install beyond halfbyte[compile]; torchao's CPU path for int4 weight-only calls the aten kernel directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from peers import Problem


def dense(codes: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], group: int) -> torch.Tensor:
    """float32 [N, K]."""
    return (torch.from_numpy(codes).float() - 8) * torch.from_numpy(scale).repeat_interleave(group, 1)


class _Torch:
    dtype = torch.float32

    def _start(self, problem: Problem) -> None:
        torch.set_num_threads(problem.threads)
        torch.set_grad_enabled(False)
        self.layers: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def calls(self, x: np.ndarray[Any, Any]) -> list[Callable[[], Any]]:
        rows = torch.from_numpy(x).to(self.dtype)
        return [lambda layer=layer: layer(rows) for layer in self.layers]

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        return np.asarray(returned.float().numpy())


class TorchDense(_Torch):
    """The dequantized weight: 8 (float32) or 4 (bfloat16) times the bytes of int4."""

    def __init__(self, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)

    def build(self, problem: Problem) -> None:
        self._start(problem)
        for codes, scale in zip(problem.codes, problem.scales, strict=True):
            weight = dense(codes, scale, problem.group).to(self.dtype)
            self.layers.append(lambda x, w=weight: torch.nn.functional.linear(x, w))


class TorchInt8(_Torch):
    """int8 per token x int8 per channel, compiled: the graph of torchao's Int8DynamicActivationInt8Weight."""

    def build(self, problem: Problem) -> None:
        self._start(problem)

        def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            unit = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
            codes = torch.clamp(torch.round(x / unit), -127, 127).to(torch.int8)
            return torch._int_mm(codes, weight).to(torch.float32) * unit * scale

        compiled = torch.compile(linear, dynamic=True)
        for codes, scale in zip(problem.codes, problem.scales, strict=True):
            weight = dense(codes, scale, problem.group)
            unit = weight.abs().amax(1) / 127
            quantized = torch.round(weight / unit[:, None]).to(torch.int8).contiguous().t()
            self.layers.append(lambda x, w=quantized, s=unit: compiled(x, w, s))


class TorchaoInt4(_Torch):
    """torchao's int4 weight-only: aten::_weight_int4pack_mm_for_cpu, bfloat16 activations."""

    dtype = torch.bfloat16

    def build(self, problem: Problem) -> None:
        self._start(problem)
        aten = torch.ops.aten
        for codes, scale in zip(problem.codes, problem.scales, strict=True):
            packed = aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 1)
            factors = torch.from_numpy(scale).bfloat16().t().contiguous()
            both = torch.stack([factors, torch.zeros_like(factors)], -1).contiguous()
            self.layers.append(
                lambda x, w=packed, g=problem.group, s=both: aten._weight_int4pack_mm_for_cpu(x, w, g, s)
            )
