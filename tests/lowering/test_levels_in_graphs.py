"""Graphs that call operators on weights with a table: codes stay four bits in the archive, results are the twins'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from moe_twin import moe, random_experts
from numpy_twin import E4M3, linear, same_bits
from random_layers import random_activations, random_weight
from torch_bridge import linear_arguments, moe_arguments

import halfbyte

WEIGHT = random_weight(1, 40, 96, 16, "symmetric", "f32", bias=True, levels="e2m1")
EXPERTS = random_experts(2, 4, 96, 64, (32, 64), "symmetric", "f16", levels="iq4nl")


class _Operators(torch.nn.Module):
    def __init__(self, activations: str) -> None:
        super().__init__()
        empty = np.zeros((1, 96), np.float32)
        self.given = [
            list(linear_arguments(empty, WEIGHT, activations)[1:]),
            list(moe_arguments(EXPERTS, "none", 3)),
        ]
        for index, values in enumerate(self.given):
            for at, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    self.register_buffer(f"own{index}_{at}", value)

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            [getattr(self, f"own{index}_{at}", value) for at, value in enumerate(values)]
            for index, values in enumerate(self.given)
        ]
        return torch.ops.halfbyte.linear(x, *parts[0]), torch.ops.halfbyte.moe(x, ids, weights, *parts[1])


def test_operators_of_a_graph(tmp_path: Path, portable: str) -> None:
    x, random = random_activations(3, 7, 96) / 8, np.random.default_rng(3)
    ids, weights = random.integers(0, 4, (7, 2)), random.random((7, 2)).astype(np.float32)
    given = (torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights))
    program = torch.export.export(_Operators("fp8"), given)
    made = halfbyte.compile(program, tmp_path / "out", halfbyte.CompileOptions(cpu=portable))
    bundle = halfbyte.load(made.path)
    got = bundle.call("forward", x, ids, weights)
    assert same_bits(got[0], linear(x, WEIGHT, E4M3))
    assert same_bits(got[1], moe(x, ids, weights, EXPERTS, 3))
    sizes = {key: tensor.bytes for key, tensor in made.manifest.parameters[0].tensors.items()}
    codes = [size for key, size in sizes.items() if key.endswith("codes")]
    assert sorted(codes) == [64 * 96 // 2, 4 * 128 * 64 // 2, 4 * 128 * 96 // 2]
    assert {layer.scheme.split()[0] for layer in made.manifest.layers} == {"e2m1", "iq4nl"}
