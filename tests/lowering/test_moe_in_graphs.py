"""Graphs that call ``halfbyte::moe`` themselves, on experts that are their buffers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from moe_twin import moe, random_experts
from numpy_twin import Array, same_bits, same_by_row
from random_layers import random_activations
from torch_bridge import moe_arguments

import halfbyte
from halfbyte.errors import CompilerError
from halfbyte.runtime import Bundle

HIDDEN, COUNT, SLOTS = 72, 5, 2
EXPERTS = random_experts(3, COUNT, HIDDEN, 40, (24, 40), "integer", "f16", bias=True)


class Experts(torch.nn.Module):
    """The operator, after routing by the largest of some scores, as models do it."""

    def __init__(self, activations: str) -> None:
        super().__init__()
        *tensors, self.bits, self.up, self.down, self.kind, self.digits, self.glu, self.limit, self.levels = (
            moe_arguments(EXPERTS, activations, 3)
        )
        for index, value in enumerate(tensors):
            self.register_buffer(f"part{index}", value)
        self.count = len(tensors)

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factors, ids = torch.topk(torch.softmax(scores, -1), SLOTS)
        parts = [getattr(self, f"part{index}") for index in range(self.count)]
        settings = (self.bits, self.up, self.down, self.kind, self.digits, self.glu, self.limit, self.levels)
        return torch.ops.halfbyte.moe(x, ids, factors, *parts, *settings), ids


def given(tokens: int) -> tuple[Array, Array]:
    scores = np.random.default_rng(tokens).normal(size=(tokens, COUNT)).astype(np.float32)
    scores[1::3] = np.round(scores[1::3])  # ties
    return random_activations(tokens, tokens, HIDDEN) / 4, scores


def check(bundle: Bundle, tokens: int, digits: int) -> None:
    x, scores = given(tokens)
    y, ids = bundle.call("forward", x, scores)
    probabilities = torch.softmax(torch.from_numpy(scores), -1)
    factors, want = torch.topk(probabilities, SLOTS)  # of equal scores those that torch takes
    np.testing.assert_array_equal(ids, want.numpy())
    expected = moe(x, want.numpy(), factors.numpy(), EXPERTS, digits)
    close = np.abs(y - expected) <= 1e-6 * np.abs(expected).max(initial=1e-30)
    assert same_bits(y, expected) or close.all(), same_by_row(y, expected)


@pytest.mark.parametrize(("activations", "digits"), [("int8", 1), ("none", 3)])
def test_any_number_of_tokens(activations: str, digits: int, tmp_path: Path) -> None:
    x, scores = (torch.from_numpy(value) for value in given(5))
    tokens = torch.export.Dim("T", min=0, max=4096)
    program = torch.export.export(
        Experts(activations), (x, scores), dynamic_shapes=({0: tokens}, {0: tokens})
    )
    compiled = halfbyte.compile(program, tmp_path / "bundle")
    bundle = halfbyte.load(compiled.path)
    for count in (0, 1, 2, 7, 64, 600):
        check(bundle, count, digits)
    [kernel] = {layer.kernel for layer in compiled.manifest.layers}
    assert "gemm_up_silu" in kernel and "gemm_down" in kernel


def test_one_token(tmp_path: Path) -> None:
    x, scores = (torch.from_numpy(value) for value in given(1))
    program = torch.export.export(Experts("int8"), (x, scores))
    check(halfbyte.load(halfbyte.compile(program, tmp_path / "bundle").path), 1, 1)


def test_experts_must_be_state(tmp_path: Path) -> None:
    x, scores = (torch.from_numpy(value) for value in given(5))

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Experts("int8")

        def forward(self, x: torch.Tensor, scores: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            factors, ids = torch.topk(scores, SLOTS)
            parts = [codes, *(getattr(self.inner, f"part{index}") for index in range(1, self.inner.count))]
            inner = self.inner
            settings = (inner.bits, inner.up, inner.down, inner.kind, inner.digits, inner.glu, inner.limit)
            return torch.ops.halfbyte.moe(x, ids, factors, *parts, *settings)

    module = Sum()
    program = torch.export.export(module, (x, scores, module.inner.part0))
    with pytest.raises(CompilerError, match="must be state"):
        halfbyte.compile(program, tmp_path / "bundle")
