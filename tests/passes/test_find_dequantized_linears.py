"""Linears that graphs dequantize by plain operations become halfbyte::linear, however they are packed and spelled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dequantizing_models import SPELLINGS, AwqLinear, GptqLinear, GroupedLinear, exact_output
from numpy_twin import TYPES, Array, Weight, linear, same_bits
from random_layers import random_activations, random_weight
from rewritten_graphs import Named, export, float_products, linears, run, state
from torch_bridge import array, nibbles

import halfbyte
from halfbyte.passes.program import Program


def check(
    module: torch.nn.Module,
    weight: Weight,
    *,
    order: Array | None = None,
    io: str = "f32",
    decomposed: bool = False,
    limit: float = 4e-6,
) -> Program:
    """Rewrites, and compares the stored weight, the bits of the result, and the result itself."""
    inputs = weight.codes.shape[1]
    x = random_activations(3, 5, inputs, io)
    program = halfbyte.rewrite(export(Named(layer=module), x, decomposed=decomposed))
    assert len(linears(program)) == 1
    assert float_products(program) == []
    assert program.report.refusals == []
    [row] = program.report.layers
    assert (row.name, row.shape, row.activations) == ("layer", weight.codes.shape, "none")
    found = state(program, "layer.permutation")
    places = np.arange(inputs) if found is None else found
    assert (found is None) == (order is None)
    in_order = np.arange(inputs) if order is None else order
    where = np.argsort(in_order)  # input -> column of weight
    codes = weight.codes[:, where[places]]
    np.testing.assert_array_equal(state(program, "layer.codes"), nibbles(codes))
    groups = where[places][:: weight.group_size] // weight.group_size
    ordered = Weight(
        codes,
        weight.scale[:, groups],
        weight.group_size,
        None if weight.zero is None else weight.zero[:, groups],
        None if weight.minimum is None else weight.minimum[:, groups],
        weight.bias,
    )
    for rows in (1, 5, 9):
        x = random_activations(rows, rows, inputs, io)
        got = run(program, x)
        assert same_bits(got, linear(x[:, places], ordered, 3 if io == "f32" else 2))
        exact = exact_output(x, weight, order)
        assert np.abs(got.astype(np.float64) - exact).max() <= limit * np.abs(exact).max()
    return program


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_spelling_before_and_after_decomposition(decomposed: bool, spelling: str, bias: bool) -> None:
    weight = random_weight(1, 16, 64, 32, "integer", bias=bias)
    check(GptqLinear(weight, spelling=spelling), weight, decomposed=decomposed)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("words", [torch.int32, torch.int64])
@pytest.mark.parametrize("decomposed", [False, True])
def test_gptq_words_of_both_versions(version: int, words: torch.dtype, decomposed: bool) -> None:
    weight = random_weight(2, 24, 96, 32, "integer", "f16", bias=True)
    program = check(GptqLinear(weight, version=version, words=words), weight, decomposed=decomposed)
    assert (
        state(program, "layer.scale").dtype == np.float32 or state(program, "layer.scale").dtype == np.float16
    )


@pytest.mark.parametrize("decomposed", [False, True])
def test_symmetric_zero_points_are_not_stored(decomposed: bool) -> None:
    weight = random_weight(2, 8, 64, 16, "symmetric")
    for module in (GptqLinear(weight), GroupedLinear(weight), GroupedLinear(weight, signed=True)):
        program = check(module, weight, decomposed=decomposed)
        assert state(program, "layer.zero") is None
        assert "int4 symmetric, group 16" in program.report.layers[0].scheme


@pytest.mark.parametrize("decomposed", [False, True])
def test_activation_order_becomes_one_permutation(decomposed: bool) -> None:
    weight = random_weight(4, 16, 96, 32, "integer")
    order = np.random.default_rng(4).permutation(96)
    program = check(GptqLinear(weight, order=order), weight, order=order, decomposed=decomposed)
    assert "act-order" in program.report.layers[0].scheme


def test_activation_order_with_a_shorter_group() -> None:
    weight = random_weight(4, 8, 72, 32, "integer")
    order = np.random.default_rng(5).permutation(72)
    check(GptqLinear(weight, order=order), weight, order=order)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("constant_zero", [False, True])
def test_interleaved_columns(decomposed: bool, constant_zero: bool) -> None:
    """Case 3: zero points that are all different, interleaved like the codes."""
    weight = random_weight(5, 16, 64, 32, "integer")
    assert weight.zero is not None
    weight.zero[:] = 5 if constant_zero else np.arange(16)[:, None]
    check(AwqLinear(weight), weight, decomposed=decomposed)


@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"),
    [(8, 192, 128), (8, 136, 136), (8, 64, 8), (48, 40, 16), (16, 416, 32)],
)
def test_ragged_channelwise_and_small_groups(outputs: int, inputs: int, group_size: int) -> None:
    """Cases 15, 29 and 32: a shorter last group, one group, an odd number of groups."""
    weight = random_weight(6, outputs, inputs, group_size, "integer", bias=True)
    program = check(GptqLinear(weight), weight)
    scheme = program.report.layers[0].scheme
    assert ("channelwise" in scheme) == (inputs == group_size)
    assert state(program, "layer.scale").shape == (outputs, -(-inputs // group_size))


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("spelling", ["linear", "matmul"])
def test_minimum_instead_of_a_zero_point(decomposed: bool, spelling: str) -> None:
    weight = random_weight(7, 12, 96, 32, "minimum", bias=True)
    program = check(GroupedLinear(weight, spelling=spelling), weight, decomposed=decomposed, limit=1e-5)
    assert "int4 minimum, group 32" in program.report.layers[0].scheme


@pytest.mark.parametrize("kind", ["symmetric", "integer"])
def test_weights_of_n_by_k_in_groups(kind: str) -> None:
    weight = random_weight(8, 12, 96, 16, kind, bias=True)
    for spelling in ("linear", "matmul"):
        check(GroupedLinear(weight, spelling=spelling), weight)


@pytest.mark.parametrize(("io", "limit"), [("f16", 2e-3), ("bf16", 2e-2)])
def test_casts_between_scale_weight_and_product(io: str, limit: float) -> None:
    """float16 scales, multiplied in float32, weights cast to the dtype of the activations."""
    weight = random_weight(9, 16, 64, 32, "integer", "f16", bias=True)
    assert weight.bias is not None
    weight.bias[:] = weight.bias.astype(TYPES[io])  # the graph casts it
    check(GptqLinear(weight, spelling="linear"), weight, io=io, limit=limit)


class _Twice(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def test_a_weight_that_is_used_twice_is_stored_once() -> None:
    weight = random_weight(10, 32, 32, 16, "integer", bias=True)
    x = random_activations(1, 4, 32)
    program = halfbyte.rewrite(export(_Twice(GptqLinear(weight)), x))
    assert len(linears(program)) == 2
    assert len(program.report.layers) == 1
    assert state(program, "layer.codes") is not None
    first = np.tanh(linear(x, weight, 3))
    np.testing.assert_allclose(run(program, x), linear(first, weight, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 5, 64), (64,)])
@pytest.mark.parametrize("decomposed", [False, True])
def test_inputs_of_other_ranks(shape: tuple[int, ...], decomposed: bool) -> None:
    weight = random_weight(11, 8, 64, 16, "integer", bias=True)
    x = random_activations(1, int(np.prod(shape[:-1])), 64).reshape(shape)
    spelling = "linear" if len(shape) == 1 else "matmul"
    program = halfbyte.rewrite(
        export(Named(layer=GptqLinear(weight, spelling=spelling)), x, decomposed=decomposed, rows=False)
    )
    if len(linears(program)) == 0:
        assert len(shape) == 1  # a vector times a matrix decomposes to a product that is no linear
        return
    got = run(program, x)
    assert got.shape == (*shape[:-1], 8)
    assert same_bits(got.reshape(-1, 8), linear(x.reshape(-1, 64), weight, 3))


def test_int8_activations_and_min_tokens_are_passed_on() -> None:
    weight = random_weight(12, 8, 64, 16, "integer")
    x = random_activations(1, 6, 64)
    program = halfbyte.rewrite(export(GptqLinear(weight), x), activations="int8", min_tokens=4)
    assert same_bits(run(program, x), linear(x, weight, 1))
    assert same_bits(run(program, x[:3]), linear(x[:3], weight, 3))
    assert program.report.layers[0].activations == "int8"


def test_nothing_of_the_packed_weight_is_left() -> None:
    weight = random_weight(13, 16, 64, 32, "integer", bias=True)
    program = halfbyte.rewrite(export(Named(layer=GptqLinear(weight)), random_activations(1, 5, 64)))
    entry = program.entries["forward"]
    assert set(entry.state_dict) == {"layer.codes", "layer.scale", "layer.zero", "layer.bias"}
    assert entry.constants == {}
    names = {spec.target for spec in entry.graph_signature.input_specs if spec.target}
    assert names == set(entry.state_dict)
    assert sum(node.op == "placeholder" for node in entry.graph.nodes) == len(names) + 1


# ---------------------------------------------------------------- what else a graph may do


class _Wrapped(torch.nn.Module):
    """Case 98: logs, takes keyword arguments and None, returns dicts and tuples."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, mask: Any = None, **kwargs: Any) -> dict[str, Any]:
        import logging

        logging.getLogger("model").warning("rope scaling is not what you think")
        y = self.layer(x)
        return {"hidden": y, "pair": (y * 2, x), "none": None}


def test_models_that_log_and_return_structures() -> None:
    weight = random_weight(14, 8, 64, 16, "integer")
    x = random_activations(1, 5, 64)
    value = torch.from_numpy(x)
    program = torch.export.export(_Wrapped(GptqLinear(weight)), (value,), {"mask": None}, strict=False)
    rewritten = halfbyte.rewrite(program)
    got = rewritten.entries["forward"].module()(value, mask=None)
    want = linear(x, weight, 3)
    assert same_bits(array(got["hidden"]), want)
    assert same_bits(array(got["pair"][0]), want * 2)
    assert got["none"] is None


@pytest.mark.parametrize("before", [True, False])
def test_models_cast_to_another_dtype(before: bool) -> None:
    """Case 27: bfloat16 modules made float32 give float32, whichever comes first."""
    weight = random_weight(15, 8, 64, 16, "integer", "bf16", bias=False)
    module = GroupedLinear(weight)
    module = (module.to(torch.bfloat16) if before else module).to(torch.float32)
    x = random_activations(1, 5, 64)
    program = halfbyte.rewrite(export(module, x))
    node = linears(program)[0]
    assert node.meta["val"].dtype is torch.float32
    got = run(program, x)
    assert got.dtype == np.float32
    assert same_bits(got, linear(x, weight, 3))


def test_a_module_needs_an_example() -> None:
    weight = random_weight(15, 8, 64, 16)
    with pytest.raises(halfbyte.HalfbyteError, match="a module needs example inputs"):
        halfbyte.rewrite(GptqLinear(weight))
    with pytest.raises(halfbyte.HalfbyteError, match="unknown kind of activations"):
        halfbyte.rewrite(GptqLinear(weight), (torch.zeros(2, 64),), activations="fp4")
    program = halfbyte.rewrite(GptqLinear(weight), (torch.zeros(2, 64),))
    assert len(linears(program)) == 1
