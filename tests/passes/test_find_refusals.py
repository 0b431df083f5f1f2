"""What is left in float, and why; names that the graph already uses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dequantizing_models import Dequantizing, GptqLinear, GroupedLinear, exact_output
from numpy_twin import Array, Weight, linear, same_bits
from random_layers import random_activations, random_weight
from rewritten_graphs import Named, export, float_products, linears, run, run_all, state
from torch_bridge import array, nibbles

import halfbyte
from halfbyte.errors import UnsupportedLayerError
from halfbyte.passes.program import Program


def left_alone(module: torch.nn.Module, weight: Weight, found: str, accepted: str) -> Program:
    """The linear is refused with a reason, and computes what it did."""
    x = random_activations(3, 5, weight.codes.shape[1])
    program = halfbyte.rewrite(export(Named(layer=module), x))
    assert linears(program) == []
    assert len(float_products(program)) == 1
    [refusal] = program.report.refusals
    assert refusal.layer == "layer"
    assert found in refusal.found and accepted in refusal.accepted and refusal.advice
    [row] = program.report.layers
    assert (row.name, row.scheme, row.activations, row.shape) == (
        "layer",
        "float",
        "float",
        weight.codes.shape,
    )
    assert found in row.reason
    got = run(program, x)
    with torch.no_grad():
        want = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    with pytest.raises(UnsupportedLayerError, match="layer: this layer cannot be compiled as asked") as error:
        program.report.raise_refusals()
    assert found in str(error.value)
    return program


def test_codes_of_more_than_eight_bits() -> None:
    weight = random_weight(1, 8, 64, 16)
    wide = dataclasses.replace(weight, codes=weight.codes.astype(np.int16))
    wide.codes[2, 5] = 256
    left_alone(GroupedLinear(wide), wide, "codes from 0 to 256", "0 to 255")


def test_fp8_activations_beside_eight_bits() -> None:
    weight = random_weight(1, 8, 64, 16, bits=8)
    x = random_activations(3, 5, 64)
    program = halfbyte.rewrite(export(Named(layer=GroupedLinear(weight)), x), activations="fp8")
    assert linears(program) == []
    [refusal] = program.report.refusals
    assert "fp8" in refusal.found


@pytest.mark.parametrize(
    ("kind", "signed"), [("symmetric", False), ("symmetric", True), ("integer", False), ("minimum", False)]
)
def test_codes_of_eight_bits(kind: str, signed: bool) -> None:
    weight = random_weight(1, 8, 64, 16, kind, bits=8)
    x = random_activations(3, 5, 64)
    program = halfbyte.rewrite(export(Named(layer=GroupedLinear(weight, signed=signed)), x))
    assert len(linears(program)) == 1
    assert same_bits(run(program, x), linear(x, weight, 3))
    assert program.report.layers[0].mode == "W8A16"


def test_zero_points_of_more_than_four_bits() -> None:
    weight = random_weight(1, 8, 64, 16)
    assert weight.zero is not None
    weight.zero[1, 1] = 16
    left_alone(GroupedLinear(weight), weight, "zero points from", "0 to 15")


@pytest.mark.parametrize("group_size", [4, 12, 20])
def test_groups_that_are_no_multiple_of_eight(group_size: int) -> None:
    weight = random_weight(1, 8, 120, group_size)
    left_alone(GroupedLinear(weight), weight, f"scales that change every {group_size}", "a multiple of 8")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_no_numbers(bad: float) -> None:
    weight = random_weight(1, 8, 64, 16)
    weight.scale[3, 2] = bad
    module = GroupedLinear(weight)
    program = halfbyte.rewrite(export(Named(layer=module), random_activations(1, 5, 64)))
    assert linears(program) == []
    assert program.report.refusals[0].found == "scales that are NaN or Inf"


def test_a_zero_point_and_a_minimum() -> None:
    weight = random_weight(1, 8, 64, 16, "minimum")
    module = GroupedLinear(weight)
    module.keep("zero", random_weight(1, 8, 64, 16).zero[:, :, None])  # type: ignore[index]
    left_alone(module, weight, "both a zero point and a minimum", "one of the two")


def test_float_linears_are_named_and_left() -> None:
    x = random_activations(1, 5, 64)
    plain = torch.nn.Linear(64, 24)
    quantized = random_weight(2, 16, 64, 16)
    program = halfbyte.rewrite(export(Named(float_one=plain, layer=GptqLinear(quantized)), x))
    assert len(linears(program)) == 1
    rows = {row.name: row for row in program.report.layers}
    assert rows.keys() == {"float_one", "layer"}
    assert rows["float_one"].reason == "its weight is float"
    assert (rows["float_one"].shape, rows["float_one"].storage) == ((24, 64), "graph float32")
    assert program.report.refusals == []
    first, second = run_all(program, x)
    np.testing.assert_allclose(first, plain(torch.from_numpy(x)).detach().numpy(), rtol=1e-4, atol=1e-4)
    assert same_bits(second, linear(x, quantized, 3))


class _Attention(torch.nn.Module):
    """Products of two things that depend on the input, and of a weight of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heads", torch.randn(5, 64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.t()
        return torch.bmm((scores @ x)[:, None], self.heads)


def test_products_that_are_no_linears_are_not_rows() -> None:
    program = halfbyte.rewrite(export(_Attention(), random_activations(1, 5, 64), rows=False))
    assert program.report.layers == []
    assert program.report.refusals == []


def test_one_of_two_layers_is_refused() -> None:
    """Case 35: nothing silent; the report lists the one that was not done."""
    good, bad = random_weight(2, 16, 64, 16), random_weight(3, 8, 64, 4)
    x = random_activations(1, 5, 64)
    program = halfbyte.rewrite(export(Named(one=GptqLinear(good), two=GroupedLinear(bad)), x))
    schemes = {row.name: row.scheme for row in program.report.layers}
    assert schemes == {"one": "int4 integer, group 16, f32 scales", "two": "float"}
    assert [refusal.layer for refusal in program.report.refusals] == ["two"]
    first, second = run_all(program, x)
    assert same_bits(first, linear(x, good, 3))
    np.testing.assert_allclose(second, exact_output(x, bad), rtol=1e-4, atol=1e-3)


def test_all_refusals_are_told_at_once() -> None:
    bad = random_weight(3, 8, 64, 4)
    module = Named(one=GroupedLinear(bad), two=GroupedLinear(bad), three=GroupedLinear(bad))
    program = halfbyte.rewrite(export(module, random_activations(1, 5, 64)))
    with pytest.raises(UnsupportedLayerError) as error:
        program.report.raise_refusals()
    assert str(error.value).startswith("3 layers cannot be compiled as asked:")
    assert all(f"\n  {name}: found scales" in str(error.value) for name in ("one", "two", "three"))


# ---------------------------------------------------------------- names


class _TwoWeights(Dequantizing):
    """One module that holds two weights."""

    def __init__(self, first: Weight, second: Weight) -> None:
        super().__init__(None, "matmul")
        for name, weight in (("first", first), ("second", second)):
            self.keep(f"{name}_codes", weight.codes)
            self.keep(f"{name}_scale", weight.scale.repeat(weight.group_size, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for name in ("first", "second"):
            weight = (getattr(self, f"{name}_codes").float() - 8) * getattr(self, f"{name}_scale")
            results.append(torch.nn.functional.linear(x, weight))
        return tuple(results)


@pytest.mark.parametrize("shapes", [((8, 64), (8, 64)), ((8, 64), (24, 64))])
@pytest.mark.parametrize("decomposed", [False, True])
def test_two_weights_of_one_module_stay_two(
    shapes: tuple[tuple[int, int], tuple[int, int]], decomposed: bool
) -> None:
    first, second = (random_weight(seed, *shape, 16, "symmetric") for seed, shape in enumerate(shapes))
    x = random_activations(1, 5, 64)
    program = halfbyte.rewrite(export(Named(mlp=_TwoWeights(first, second)), x, decomposed=decomposed))
    assert [row.name for row in program.report.layers] == ["mlp", "mlp_2"]
    got = run_all(program, x)
    assert same_bits(got[0], linear(x, first, 3))
    assert same_bits(got[1], linear(x, second, 3))


class _TakenNames(torch.nn.Module):
    """A module whose own buffers are called what a packed layer's are called, and are used otherwise too."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.register_buffer("codes", torch.from_numpy(weight.codes))
        self.register_buffer("scale", torch.from_numpy(weight.scale.repeat(weight.group_size, 1)))
        self.register_buffer("bias", torch.arange(weight.codes.shape[0], dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = (self.codes.float() - 8) * self.scale
        y = torch.nn.functional.linear(x, weight, self.bias * 2)
        return y, y + self.bias + self.codes[:, 0] + self.scale[:, 1]


@pytest.mark.parametrize("decomposed", [False, True])
def test_buffers_of_the_user_keep_their_values(decomposed: bool) -> None:
    weight = random_weight(5, 12, 64, 16, "symmetric")
    x = random_activations(1, 5, 64)
    program = halfbyte.rewrite(export(Named(layer=_TakenNames(weight)), x, decomposed=decomposed))
    assert len(linears(program)) == 1
    np.testing.assert_array_equal(state(program, "layer.codes"), nibbles(weight.codes))
    bias = np.arange(12, dtype=np.float32)
    want = linear(x, Weight(weight.codes, weight.scale, 16, bias=bias * 2), 3)
    y, z = run_all(program, x)
    assert same_bits(y, want)
    np.testing.assert_allclose(z, want + bias + weight.codes[:, 0] + weight.scale[:, 0], rtol=1e-6)


class _AtTheTop(torch.nn.Module):
    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.register_buffer("codes", torch.from_numpy(weight.codes))
        self.register_buffer("scale", torch.from_numpy(weight.scale.repeat(weight.group_size, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, (self.codes.float() - 8) * self.scale)


def test_a_weight_of_no_module_has_a_name_too() -> None:
    weight = random_weight(5, 12, 64, 16, "symmetric")
    x: Array = random_activations(1, 5, 64)
    program = halfbyte.rewrite(export(_AtTheTop(weight), x))
    [row] = program.report.layers
    assert row.name
    assert state(program, f"{row.name}.codes") is not None
    assert same_bits(array(program.entries["forward"].module()(torch.from_numpy(x))), linear(x, weight, 3))
