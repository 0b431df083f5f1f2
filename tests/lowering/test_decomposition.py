"""Decomposing operator by operator: the same numbers, fewer traces, and what must be traced whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.export import Dim, ExportedProgram

from halfbyte.lowering import decomposition
from halfbyte.lowering.decomposition import decomposed
from halfbyte.lowering.importer import WHOLE, decompositions

LAYERS = 7
COMPOSITES = {
    "aten.silu.default",
    "aten.linear.default",
    "aten.to.dtype",
    "aten.reshape.default",
    "aten.topk.default",
}


class _Layers(torch.nn.Module):
    """Equal layers of composite operators, several results, sizes that vary and are computed with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linears = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = x.shape[0]
        for linear in self.linears:
            heads = (
                torch.nn.functional.silu(linear(x.to(torch.float32))).reshape(1, count, 4, 8).transpose(1, 2)
            )
            heads = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            left, right = heads.transpose(1, 2).reshape(count, 32).chunk(2, -1)
            x = self.norm(torch.cat([-right, left], -1) * scale + x)
            x = torch.where(
                x > scale, x * scale, x * scale.sin()
            )  # values of one kind that must not be mixed up
        values, places = torch.topk(x, 3, -1)
        spread, mean = torch.var_mean(x, -1)
        return x, values, places, spread + mean * (2 * count + 1), scale


def exported(module: torch.nn.Module, *example: torch.Tensor) -> ExportedProgram:
    sizes = ({0: Dim("T", min=2, max=64)}, *(None for _ in example[1:]))
    return torch.export.export(module.eval(), example, dynamic_shapes=sizes, strict=False)


def operators(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_results_are_those_of_the_model_and_equal_layers_are_traced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, scale = _Layers(), torch.rand(32)
    program = exported(module, torch.rand(5, 32), scale)
    traced: list[Any] = []
    usual = decomposition.make_fx
    monkeypatch.setattr(decomposition, "make_fx", lambda *a, **k: traced.append(a) or usual(*a, **k))
    lowered = decomposed(program, decompositions(), WHOLE)
    found = operators(lowered)
    assert not COMPOSITES & set(found)
    assert found.count("aten.scaled_dot_product_attention.default") == LAYERS
    assert 0 < len(traced) < 40 < len(found)
    for count in (2, 5, 33):
        x = torch.randn(count, 32)
        for got, want in zip(lowered.module()(x, scale), module(x, scale), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_operators_are_torchs_own_decomposition() -> None:
    program = exported(_Layers(), torch.rand(5, 32), torch.rand(32))
    table = decompositions()
    whole = [name for name in operators(program.run_decompositions(table)) if "_assert_tensor" not in name]
    assert operators(decomposed(program, table, WHOLE)) == whole


def test_the_given_program_stays_as_it_is() -> None:
    program = exported(_Layers(), torch.rand(5, 32), torch.rand(32))
    before = (str(program.graph), str(program.graph_signature))
    decomposed(program, decompositions(), WHOLE)
    assert (str(program.graph), str(program.graph_signature)) == before


class _FamiliesWrites(torch.nn.Module):
    """As the layers of Mixtral, DeepSeek and GLM write: weights, masks, keys put together by parts."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, places = torch.topk(x.softmax(-1), 3, -1)
        weights /= weights.sum(-1, keepdim=True)
        mask = torch.zeros_like(x)
        mask.scatter_(1, places, 1)
        keys = x.new_empty(2, x.shape[0], 12)
        keys[..., :8] = x
        keys[..., 8:] = x[:, :1]
        return weights, x.masked_fill(mask == 0, -1.0), keys


class _Parts(torch.nn.Module):
    """Writes to parts of parts, one after the other, seen in all of them and in later views; dtypes that stay."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, before = torch.ones(x.shape, dtype=torch.float16), x + 1
        rows = y[:, 1:7]
        part = rows.select(1, 2)
        part += x[:, 0]  # float32, added to float16
        kept = part * 1
        rows[:, ::2] = rows[:, 1::2] * before[:, :3]
        some, later = rows * 1, y[:, 2:5] + 1
        y.mul_(3.0)
        return y, kept, some, later, before


class _AnotherView(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        turned, half = y.t(), y[:, :4]
        half += 1
        return y, turned * 1


class _Turned(torch.nn.Module):
    """The part is turned, what it is a part of is not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.new_ones(2, 3, 3)
        part = y[0]
        part[1] = x[0, :3]
        part.t_()
        return y * 1, part * 1


class _Reshaped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.view(-1)[3:9] = 5.0
        return y


class _Split(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = x.relu().split(4, -1)
        left.add_(1)
        return left * 1, right * 1


class _Cloned(torch.nn.Module):
    """The argument itself stays as it is."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y[:, 1] = 7.0
        return x * 1, y


class _Constant(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


@pytest.mark.parametrize(
    ("module", "whole"),
    [
        (_FamiliesWrites(), False),
        (_Parts(), False),
        (_Cloned(), False),
        (_AnotherView(), True),
        (_Turned(), True),
        (_Reshaped(), True),
        (_Split(), True),
        (_Constant(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_writes_and_constants(module: torch.nn.Module, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported(module, torch.rand(3, 8))
    before, traced = str(program.graph), []
    usual = ExportedProgram.run_decompositions
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda *a, **k: traced.append(a) or usual(*a, **k)
    )
    lowered = decomposed(program, decompositions(), WHOLE)
    assert bool(traced) is whole and str(program.graph) == before
    assert not any(name.partition(".")[2].partition(".")[0].endswith("_") for name in operators(lowered))
    for count in (2, 6):
        x = torch.randn(count, 8)
        got, want = lowered.module()(x), module(x)
        for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_arguments_may_be_called_as_python_calls_its_own() -> None:
    class Named(torch.nn.Module):
        def forward(self, input: torch.Tensor, list: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(input) * list

    x = torch.randn(5, 8)
    program = decomposed(exported(Named(), x, x), decompositions(), WHOLE)
    assert [node.name for node in program.graph.nodes if node.op == "placeholder"] == ["input", "list"]
    torch.testing.assert_close(program.module()(x, x), torch.nn.functional.silu(x) * x)
