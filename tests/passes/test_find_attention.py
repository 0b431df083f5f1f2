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


class Repeats(torch.nn.Module):
    """Key heads repeated for the heads of queries, as transformers' ``repeat_kv`` does it, or in another order."""

    def __init__(self, keys: int, values: int, other_order: bool = False) -> None:
        super().__init__()
        self.counts, self.other_order = (keys, values), other_order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x[..., :96].unflatten(-1, (6, 16)).transpose(1, 2)
        sides = []
        for count, part in zip(self.counts, (x[..., 96:192], x[..., 192:]), strict=True):
            few = part[..., : count * 16].unflatten(-1, (count, 16)).transpose(1, 2)
            dim = 1 if self.other_order else 2
            shape = list(few.shape)
            shape.insert(dim, 6 // count)
            sides.append(few.unsqueeze(dim).expand(shape).reshape(1, 6, -1, 16))
        return sdpa(q, *sides, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("module", "heads"),
    [(Repeats(2, 2), 2), (Repeats(1, 1), 1), (Repeats(2, 3), 6), (Repeats(2, 2, other_order=True), 6)],
)
def test_repeated_heads_are_kept_once(module: torch.nn.Module, heads: int) -> None:
    program = rewritten(module, torch.randn(1, 5, 288))
    assert list(program.report.attention.values()) == ["halfbyte::attention"]
    [node] = [
        node
        for node in program.entries["forward"].graph.nodes
        if node.target is torch.ops.halfbyte.attention.default
    ]
    assert node.args[1].meta["val"].shape[0] == heads
    for tokens in (2, 70):
        x = torch.randn(1, tokens, 288, generator=torch.Generator().manual_seed(tokens))
        found = program.entries["forward"].module()(x)
        torch.testing.assert_close(found, module(x), atol=3e-6, rtol=0)


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
