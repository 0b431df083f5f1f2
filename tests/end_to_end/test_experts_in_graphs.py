"""Graphs of users with experts: transformers' blocks, loops that depend on data, ways to add up what experts gave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_experts import made_model

import halfbyte
from halfbyte.errors import UnsupportedLayerError


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_block_of_transformers(tmp_path: Path, family: str) -> None:
    """Cases 84, 85, 86: a loop over the experts that are hit; the example hits few, six experts, no tokens."""
    made = made_model(family, **({"decoder_sparse_step": 1} if family == "qwen3_moe" else {}))
    experts = made.model.get_submodule("model.layers.1.mlp").experts
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.experts(x, ids, weights)
            return out

    block, tokens = Block(), torch.export.Dim("T", min=0, max=64)
    example = (x, torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2))
    shapes = ({0: tokens}, {0: tokens}, {0: tokens})
    program = halfbyte.rewrite(block, example, dynamic_shapes=shapes)
    assert block.experts is experts
    bundle = halfbyte.load(halfbyte.compile(program, tmp_path / "out").path)
    for count in (1, 7, 64, 0):
        random = torch.Generator().manual_seed(count)
        x = torch.randn(count, 64, generator=random)
        ids = torch.stack(
            [torch.randperm(6, generator=random)[:2] for _ in range(count)] or [torch.zeros(2).long()]
        )
        ids, weights = ids[:count], torch.rand(count, 2, generator=random)
        with torch.no_grad():
            want = block(x, ids, weights).numpy()
        [got] = bundle.call("forward", x.numpy(), ids.numpy(), weights.numpy())
        assert got.shape == want.shape == (count, 64)
        assert np.abs(got - want).max(initial=0) <= 1e-5 * np.abs(want).max(initial=1)


def test_a_loop_of_the_users_own_is_explained() -> None:
    """Case 85."""

    class Loop(torch.nn.Module):
        def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            chosen = torch.nn.functional.one_hot(scores.argmax(-1), 4)
            out = torch.zeros_like(x)
            for expert in (chosen.sum(0) > 0).nonzero():
                [rows] = torch.where(chosen[:, expert[0]])
                out = out.index_add(0, rows, x[rows] * expert[0])
            return out

    with pytest.raises(UnsupportedLayerError, match="Loop: the module decides by the values") as error:
        halfbyte.rewrite(Loop(), (torch.randn(5, 8), torch.randn(5, 4)))
    assert "nonzero" in str(error.value) and "halfbyte.moe" in str(error.value)


@pytest.mark.parametrize("how", ["index_add", "index_put", "one-hot"])
def test_duplicates_add_up(tmp_path: Path, how: str) -> None:
    """Case 90: several rows for one token, with any number of rows."""

    class Combine(torch.nn.Module):
        def forward(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(5, 8)
            if how == "index_add":
                return out.index_add(0, tokens, rows)
            if how == "index_put":
                return out.index_put((tokens,), rows, accumulate=True)
            return torch.nn.functional.one_hot(tokens, 5).float().T @ rows

    count, random = torch.export.Dim("R", min=1, max=64), torch.Generator().manual_seed(0)
    example = (torch.randn(6, 8), torch.tensor([0, 1, 0, 2, 1, 0]))
    program = torch.export.export(Combine(), example, dynamic_shapes=({0: count}, {0: count}))
    bundle = halfbyte.load(halfbyte.compile(program, tmp_path / "out").path)
    for rows in (2, 6, 33):
        x, tokens = torch.randn(rows, 8, generator=random), torch.randint(0, 5, (rows,), generator=random)
        tokens[-2:] = 3
        [got] = bundle.call("forward", x.numpy(), tokens.numpy())
        np.testing.assert_allclose(got, Combine()(x, tokens).numpy(), rtol=1e-5, atol=1e-6)
