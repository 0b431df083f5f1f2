"""Graphs that call ``halfbyte::fp8_block_moe`` themselves, on experts that are their buffers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fp8_moe_twin import fp8_moe, fp8_moe_arguments, random_fp8_experts
from random_layers import random_activations

import halfbyte
from halfbyte.errors import CompilerError

HIDDEN, COUNT, SLOTS = 72, 5, 2
EXPERTS = random_fp8_experts(3, COUNT, HIDDEN, 40, ((32, 24), (32, 32)), bias=True)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        *tensors, self.a, self.b, self.c, self.d, self.kind, self.glu, self.limit = fp8_moe_arguments(
            EXPERTS, "fp8"
        )
        for index, value in enumerate(tensors):
            assert isinstance(value, torch.Tensor)
            self.register_buffer(f"part{index}", value)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        parts = [getattr(self, f"part{index}") for index in range(6)]
        settings = (self.a, self.b, self.c, self.d, self.kind, self.glu, self.limit)
        out: torch.Tensor = torch.ops.halfbyte.fp8_block_moe(x, ids, factors, *parts, *settings)
        return out


def exported(module: Experts) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("T", min=0, max=4096)
    given = (torch.zeros(5, HIDDEN), torch.zeros(5, SLOTS, dtype=torch.int64), torch.zeros(5, SLOTS))
    return torch.export.export(module, given, dynamic_shapes=tuple({0: tokens} for _ in given))


def test_any_number_of_tokens(tmp_path: Path) -> None:
    compiled = halfbyte.compile(exported(Experts()), tmp_path / "bundle")
    bundle = halfbyte.load(compiled.path)
    for tokens in (0, 1, 7, 50):
        random, x = np.random.default_rng(tokens), random_activations(tokens, tokens, HIDDEN)
        ids = random.integers(0, COUNT, (tokens, SLOTS))
        factors = random.random((tokens, SLOTS)).astype(np.float32)
        [y] = bundle.call("forward", x, ids, factors)
        want, allowed = fp8_moe(x, ids, factors, EXPERTS, True)
        assert y.shape == want.shape and (np.abs(y.astype(np.float64) - want) <= allowed).all()
    [layer] = compiled.manifest.layers
    assert layer.scheme == "e4m3, blocks of 32x24, f32 scales" and layer.activations == "fp8"
    assert "gemm_up_silu_fp8" in layer.kernel and "gemm_down_fp8" in layer.kernel


def test_weights_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """NaN among the weights of the last expert."""
    module = Experts()
    module.get_buffer("part3")[COUNT - 1, 3, 4] = 0x7F
    with pytest.raises(CompilerError, match="NaN"):
        halfbyte.compile(exported(module), tmp_path / "bundle")
