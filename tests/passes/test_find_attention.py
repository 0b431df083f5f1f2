"""Causal attention of graphs becomes halfbyte::attention; what is no such thing is left alone, with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import halfbyte

sdpa = torch.nn.functional.scaled_dot_product_attention


class Attends(torch.nn.Module):
    def __init__(self, heads: int, key_heads: int, **options: Any) -> None:
        super().__init__()
        self.heads, self.key_heads, self.options = heads, key_heads, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, T, columns] as queries, keys and values beside each other."""
        width = x.shape[2] // (self.heads + 2 * self.key_heads)
        q, k, v = x.split([self.heads * width, self.key_heads * width, self.key_heads * width], -1)
        sides = [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in (q, k, v)]
        return sdpa(*sides, **self.options).transpose(1, 2).flatten(2)


def rewritten(module: torch.nn.Module, x: torch.Tensor) -> Any:
    return halfbyte.rewrite(module.eval(), (x,), dynamic_shapes=({1: torch.export.Dim("T", min=2, max=500)},))


def targets(program: Any) -> set[str]:
    return {str(node.target) for node in program.entries["forward"].graph.nodes}


def test_finds_and_computes(tmp_path: Any) -> None:
    """Grouped heads, a scale of its own; one compilation, several lengths."""
    module = Attends(6, 2, is_causal=True, enable_gqa=True, scale=0.3)
    program = rewritten(module, torch.randn(1, 5, 200))
    assert "aten.scaled_dot_product_attention.default" not in targets(program)
    assert list(program.report.attention.values()) == ["halfbyte::attention"]
    halfbyte.compile(program, tmp_path / "out", halfbyte.CompileOptions())
    bundle = halfbyte.load(tmp_path / "out")
    for tokens in (2, 64, 131):
        x = torch.randn(1, tokens, 200, generator=torch.Generator().manual_seed(tokens))
        want = module(x)
        eager = program.entries["forward"].module()(x)
        [got] = bundle.call("forward", x.numpy())
        for found in (eager, torch.from_numpy(got)):
            torch.testing.assert_close(found, want, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "batch", "reason"),
    [
        ({}, 1, "see what comes after"),
        ({"is_causal": True}, 2, "[2, 4, "),
        ({"attn_mask": torch.zeros(1, 1)}, 1, "mask of its own"),
    ],
)
def test_leaves_alone_what_is_none(options: dict[str, Any], batch: int, reason: str) -> None:
    x = torch.randn(batch, 5, 96)
    module = Attends(4, 4, **options)
    program = rewritten(module, x)
    [said] = program.report.attention.values()
    assert said.startswith("stays as it is: ") and reason in said
    assert "aten.scaled_dot_product_attention.default" in targets(program)
    np.testing.assert_array_equal(program.entries["forward"].module()(x), module(x))
