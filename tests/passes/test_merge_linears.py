"""Linears that read the same input become one, and every column stays what it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dequantizing_models import GptqLinear, GroupedLinear
from int8_twin import linear as rounded_linear
from numpy_twin import E4M3, Array, Weight, linear, same_bits
from random_layers import KINDS, random_activations, random_weight
from rewritten_graphs import Named, export, linears, run_all, state
from torch_bridge import nibbles

from halfbyte.passes.find_dequantized_linears import FindDequantizedLinears
from halfbyte.passes.merge_linears import MergeLinears, merged_name
from halfbyte.passes.pipeline import run_passes
from halfbyte.passes.program import Program
from halfbyte.passes.scheme import Activations

DIGITS = {Activations.INT8: 1, Activations.FP8: E4M3, Activations.NONE: 3}


def rewrite(module: torch.nn.Module, x: Array, mode: Activations = Activations.NONE) -> Program:
    program = Program({"forward": export(module, x)})
    run_passes(program, [FindDequantizedLinears(mode), MergeLinears()])
    return program


def merged(*modules: torch.nn.Module) -> dict[str, list[str]]:
    """What merges of linears a, b, c, ... that all read x."""
    names = "abcdefg"[: len(modules)]
    program = rewrite(Named(**dict(zip(names, modules, strict=True))), random_activations(1, 5, 64))
    return program.report.merged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", [*DIGITS, Activations.INT8_AFFINE])
def test_every_column_is_computed_as_before(kind: str, bias: bool, mode: Activations) -> None:
    weights = [random_weight(n, n, 64, 16, kind, bias=bias) for n in (24, 8, 20)]
    x = random_activations(2, 6, 64)
    program = rewrite(
        Named(q=GroupedLinear(weights[0]), k=GroupedLinear(weights[1]), v=GroupedLinear(weights[2])), x, mode
    )
    assert len(linears(program)) == 1
    assert program.report.merged == {"q+k+v": ["q", "k", "v"]}
    assert {row.name: row.reason for row in program.report.layers} == {
        name: "computed by q+k+v" for name in "qkv"
    }
    for got, weight in zip(run_all(program, x), weights, strict=True):
        affine = mode is Activations.INT8_AFFINE
        want = rounded_linear(x, weight, mode.value) if affine else linear(x, weight, DIGITS[mode])
        assert same_bits(got, want)
    codes = np.concatenate([nibbles(weight.codes) for weight in weights])
    np.testing.assert_array_equal(state(program, "q+k+v.codes"), codes)
    assert not [name for name in program.entries["forward"].state_dict if not name.startswith("q+k+v.")]
    whole = program.layers["q+k+v"]
    assert whole.members == ("q", "k", "v")
    np.testing.assert_array_equal(whole.weight().packed().numpy(), codes)
    assert (whole.bias is not None) == bias
    if whole.bias is not None:
        np.testing.assert_array_equal(whole.bias().numpy(), np.concatenate([w.bias for w in weights]))


def test_what_differs_stays_apart() -> None:
    base = random_weight(1, 16, 64, 16, "integer")
    same = random_weight(2, 8, 64, 16, "integer")
    assert merged(GptqLinear(base), GptqLinear(same)) == {"a+b": ["a", "b"]}
    others = {
        "group size": GptqLinear(random_weight(3, 16, 64, 32, "integer")),
        "zero points": GptqLinear(random_weight(3, 16, 64, 16, "symmetric")),
        "minimum": GroupedLinear(random_weight(3, 16, 64, 16, "minimum")),
        "scale dtype": GptqLinear(random_weight(3, 16, 64, 16, "integer", "f16"), compute=torch.float16),
        "bias": GptqLinear(random_weight(3, 16, 64, 16, "integer", bias=True), spelling="linear"),
    }
    for what, module in others.items():
        assert merged(GptqLinear(base), module) == {}, what
    assert merged(GptqLinear(base), others["bias"], GptqLinear(same)) == {"a+c": ["a", "c"]}


def test_activation_orders_merge_when_they_are_equal() -> None:
    random = np.random.default_rng(0)
    one, other = random.permutation(64), random.permutation(64)
    first, second = random_weight(1, 16, 64, 16), random_weight(2, 8, 64, 16)
    x = random_activations(1, 5, 64)
    for orders, names in (((one, one), ["a+b"]), ((one, other), []), ((one, None), [])):
        module = Named(a=GptqLinear(first, order=orders[0]), b=GptqLinear(second, order=orders[1]))
        program = rewrite(module, x)
        assert list(program.report.merged) == names
        for got, weight, order in zip(run_all(program, x), (first, second), orders, strict=True):
            exact = x if order is None else x[:, order]
            np.testing.assert_allclose(got, linear(exact, weight, 3), rtol=1e-4, atol=1e-4)


class _Chain(torch.nn.Module):
    """gate and up read one input, down another; gate's result is used twice and returned."""

    def __init__(self, gate: Weight, up: Weight, down: Weight) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.gate_proj, self.mlp.up_proj = GptqLinear(gate), GptqLinear(up)
        self.mlp.down_proj = GptqLinear(down)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate = self.mlp.gate_proj(x)
        return gate, self.mlp.down_proj(gate * self.mlp.up_proj(x)) + gate[:, :64]


def test_results_that_are_outputs_and_are_used_again() -> None:
    gate, up, down = (
        random_weight(1, 96, 64, 32),
        random_weight(2, 96, 64, 32),
        random_weight(3, 64, 96, 32),
    )
    x = random_activations(1, 5, 64)
    program = rewrite(_Chain(gate, up, down), x)
    assert program.report.merged == {"mlp.gate_proj+up_proj": ["mlp.gate_proj", "mlp.up_proj"]}
    first, second = run_all(program, x)
    left, right = linear(x, gate, 3), linear(x, up, 3)
    assert same_bits(first, left)
    np.testing.assert_allclose(second, linear(left * right, down, 3) + left[:, :64], rtol=1e-5)


class _OnBoth(torch.nn.Module):
    def __init__(self, first: Weight, second: Weight) -> None:
        super().__init__()
        self.a, self.b = GptqLinear(first), GptqLinear(second)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x), self.b(x + 1), self.a(x * 2)


def test_different_inputs_are_not_merged() -> None:
    first, second = random_weight(1, 16, 64, 32), random_weight(2, 8, 64, 32)
    x = random_activations(1, 5, 64)
    program = rewrite(_OnBoth(first, second), x)
    assert program.report.merged == {}
    for got, want in zip(
        run_all(program, x),
        (linear(x, first, 3), linear(x + 1, second, 3), linear(x * 2, first, 3)),
        strict=True,
    ):
        assert same_bits(got, want)


class _SameTwice(torch.nn.Module):
    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.layer = GptqLinear(weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), -self.layer(x)


def test_one_layer_on_one_input_twice() -> None:
    weight = random_weight(1, 16, 64, 32)
    x = random_activations(1, 5, 64)
    first, second = run_all(rewrite(_SameTwice(weight), x), x)
    assert same_bits(first, linear(x, weight, 3))
    assert same_bits(second, -linear(x, weight, 3))


def test_int8_of_a_batch_and_of_three_dimensions() -> None:
    weights = [replace(random_weight(n, n, 64, 16), bias=None) for n in (8, 16)]
    x = random_activations(2, 6, 64).reshape(2, 3, 64)
    program = Program(
        {"forward": export(Named(a=GptqLinear(weights[0]), b=GptqLinear(weights[1])), x, rows=False)}
    )
    run_passes(program, [FindDequantizedLinears(Activations.INT8), MergeLinears()])
    assert len(linears(program)) == 1
    for got, weight in zip(run_all(program, x), weights, strict=True):
        assert same_bits(got.reshape(6, -1), linear(x.reshape(6, 64), weight, 1))


@pytest.mark.parametrize(
    ("members", "name"),
    [
        (("a.b.q_proj", "a.b.k_proj", "a.b.v_proj"), "a.b.q_proj+k_proj+v_proj"),
        (("gate_proj", "up_proj"), "gate_proj+up_proj"),
        (("m.0.up", "m.1.up"), "m.0.up+1.up"),
        (("m.proj", "m.proj2"), "m.proj+proj2"),
    ],
)
def test_names(members: tuple[str, ...], name: str) -> None:
    assert merged_name(members) == name
