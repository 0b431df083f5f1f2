"""Graphs of PyTorch 2 export quantization: the operators of ``quantized_decomposed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from int8_twin import AFFINE_F64, FIXED, fixed_parameters
from int8_twin import linear as rounded_linear
from numpy_twin import Weight, linear, same_bits
from random_layers import random_activations, random_weight
from rewritten_graphs import Named, export, float_products, linears, run, run_all
from torch_bridge import array, tensor

import halfbyte
from halfbyte.passes.program import Program

Q: Any = torch.ops.quantized_decomposed
WEIGHT = random_weight(1, 24, 96, 32, "integer", bias=True)
EIGHT = random_weight(2, 24, 96, 96, "symmetric", bias=True, bits=8)


class Quantized(torch.nn.Module):
    """Rounds its input by a function, and dequantizes a weight by an operator."""

    def __init__(self, weight: Weight, rounds: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rounds, self.size, self.bits = rounds, weight.group_size, weight.bits
        zero = np.full_like(weight.scale, weight.middle) if weight.zero is None else weight.zero
        self.register_buffer("w", tensor((weight.codes.astype(np.int64) - weight.middle).astype(np.int8)))
        self.register_buffer("z", tensor((zero.astype(np.int64) - weight.middle).astype(np.int32)))
        self.register_buffer("s", tensor(weight.scale))
        self.bias = torch.nn.Parameter(tensor(weight.bias))

    def dequantized(self) -> torch.Tensor:
        low, high = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        if self.s.shape[1] == 1:
            parts = (self.w, self.s.flatten(), self.z.flatten(), 0)
            return Q.dequantize_per_channel(*parts, low, high, torch.int8)
        group = (torch.int8, self.size, torch.float32)
        return Q.dequantize_per_channel_group(self.w, self.s, self.z, low, high, *group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.rounds(x), self.dequantized(), self.bias)


def per_token(choose: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounds(x: torch.Tensor) -> torch.Tensor:
        scale, zero = choose(x, torch.int8)
        codes = Q.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
        return Q.dequantize_per_token(codes, scale, zero, -128, 127, torch.int8, torch.float32)

    return rounds


def per_tensor(symmetric: bool, kind: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    low, high = (-128, 127) if kind is torch.int8 else (0, 255)

    def rounds(x: torch.Tensor) -> torch.Tensor:
        choose = Q.choose_qparams_symmetric.tensor if symmetric else Q.choose_qparams.tensor
        scale, zero = choose(x, low, high, 1e-6, kind)
        return Q.dequantize_per_tensor(
            Q.quantize_per_tensor(x, scale, zero, low, high, kind), scale, zero, low, high, kind
        )

    return rounds


def fixed(x: torch.Tensor) -> torch.Tensor:
    parts = (0.03, 7, -128, 127, torch.int8)
    return Q.dequantize_per_tensor(Q.quantize_per_tensor(x, *parts), *parts)


def of_another(x: torch.Tensor) -> torch.Tensor:
    """The scales are another tensor's."""
    scale, zero = Q.choose_qparams_per_token(x * 2, torch.int8)
    codes = Q.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    return Q.dequantize_per_token(codes, scale, zero, -128, 127, torch.int8, torch.float32)


def of_four_bits(x: torch.Tensor) -> torch.Tensor:
    scale, zero = Q.choose_qparams_per_token(x, torch.int8)
    codes = Q.quantize_per_token(x, scale, zero, -8, 7, torch.int8)
    return Q.dequantize_per_token(codes, scale, zero, -8, 7, torch.int8, torch.float32)


def rewritten(module: torch.nn.Module, decomposed: bool = False, **options: Any) -> Program:
    x = random_activations(3, 5, 96)
    program = halfbyte.rewrite(export(Named(layer=module), x, decomposed=decomposed), **options)
    assert len(linears(program)) == 1 and float_products(program) == [] and program.report.refusals == []
    return program


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("weight", [WEIGHT, EIGHT])
@pytest.mark.parametrize(
    ("choose", "activations"),
    [
        (Q.choose_qparams_per_token_asymmetric, AFFINE_F64),
        (Q._choose_qparams_per_token_asymmetric_impl, AFFINE_F64),
        (Q.choose_qparams_per_token, "int8"),
    ],
)
def test_rounding_per_token_is_the_kernels(
    choose: Any, activations: str, weight: Weight, decomposed: bool
) -> None:
    if decomposed and choose is Q._choose_qparams_per_token_asymmetric_impl:
        pytest.skip("torch decomposes it into plain operations")
    program = rewritten(Quantized(weight, per_token(choose)), decomposed)
    [row] = program.report.layers
    assert (row.name, row.mode, row.reason) == ("layer", f"W{weight.bits}A8", "")
    assert row.activations == activations and program.report.warnings == []
    x = random_activations(4, 9, 96)
    exact = activations == AFFINE_F64
    assert same_bits(
        run(program, x), rounded_linear(x, weight, AFFINE_F64) if exact else linear(x, weight, 1)
    )


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    ("rounds", "how"),
    [
        (per_tensor(False, torch.uint8), "uint8 per tensor, with zero points"),
        (per_tensor(True, torch.int8), "int8 per tensor, scale absmax / 127.5"),
        (of_another, "int8 with a fixed scale"),
        (of_four_bits, "int4 per token"),
    ],
)
def test_any_other_rounding_stays(
    rounds: Callable[[torch.Tensor], torch.Tensor], how: str, decomposed: bool
) -> None:
    program = rewritten(Quantized(WEIGHT, rounds), decomposed)
    [row] = program.report.layers
    assert row.mode == "W4A16" and how in row.reason and "stays before it" in row.reason
    assert program.report.warnings == []
    for rows in (2, 5, 9):
        x = random_activations(rows, rows, 96)
        assert same_bits(run(program, x), linear(array(rounds(tensor(x))), WEIGHT, 3))


def of_state(scale: float, zero: int, least: int, most: int, kind: torch.dtype) -> Any:
    """A fixed scale in tensors."""
    parts = (torch.tensor([scale]), torch.tensor([zero]), least, most, kind)

    def rounds(x: torch.Tensor) -> torch.Tensor:
        return Q.dequantize_per_tensor.tensor(Q.quantize_per_tensor.tensor(x, *parts), *parts)

    return rounds


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    ("rounds", "parameters"),
    [
        (fixed, (0.03, 7, -128, 127)),
        (of_state(0.04, 100, 0, 255, torch.uint8), (np.float32(0.04), -28, -128, 127)),
        (of_state(0.04, 0, 0, 127, torch.uint8), (np.float32(0.04), -128, -128, -1)),
        (of_state(0.3, -1, -8, 7, torch.int8), (np.float32(0.3), -1, -8, 7)),
    ],
)
def test_fixed_scales_are_the_kernels(rounds: Any, parameters: Any, decomposed: bool) -> None:
    for weight in (WEIGHT, EIGHT) if not decomposed else (WEIGHT,):
        module = Quantized(weight, rounds)
        program = rewritten(module, decomposed)
        [row] = program.report.layers
        assert (row.mode, row.activations) == (f"W{weight.bits}A8", FIXED)
        assert row.reason == "" and program.report.warnings == []
        x = random_activations(4, 9, 96)
        got = run(program, x)
        assert same_bits(got, rounded_linear(x, weight, FIXED, fixed_parameters(*parameters)))
        eager = array(module(tensor(x)))
        np.testing.assert_allclose(got, eager, rtol=0, atol=4e-6 * np.abs(eager).max())


def test_fixed_scales_that_no_float32_has_stay() -> None:
    for scale in (1e-45, 3e38):

        def rounds(x: torch.Tensor, scale: float = scale) -> torch.Tensor:
            parts = (scale, 0, -128, 127, torch.int8)
            return Q.dequantize_per_tensor(Q.quantize_per_tensor(x, *parts), *parts)

        [row] = rewritten(Quantized(WEIGHT, rounds)).report.layers
        assert row.mode == "W4A16" and "int8 with a fixed scale, stays before it" in row.reason


def test_linears_of_one_fixed_rounding_become_one() -> None:
    other = random_weight(5, 40, 96, 32, "integer", bias=True)
    alike, apart = of_state(0.04, 100, 0, 255, torch.uint8), of_state(0.05, 100, 0, 255, torch.uint8)
    x = random_activations(3, 5, 96)
    named = Named(a=Quantized(WEIGHT, alike), b=Quantized(other, apart), c=Quantized(other, alike))
    program = halfbyte.rewrite(export(named, x))
    assert program.report.merged == {"a+c": ["a", "c"]}
    given = [fixed_parameters(np.float32(scale), -28) for scale in (0.04, 0.05, 0.04)]
    for got, weight, fixed_ in zip(run_all(program, x), (WEIGHT, other, other), given, strict=True):
        assert same_bits(got, rounded_linear(x, weight, FIXED, fixed_))


def test_a_layer_that_is_called_twice_has_two_fixed_scales() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Quantized(WEIGHT, lambda x: x)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one, other = (of_state(scale, 0, -128, 127, torch.int8) for scale in (0.04, 0.5))
            return self.layer(one(x)), self.layer(other(x)), self.layer(one(x + 1)), self.layer(x)

    x = random_activations(3, 5, 96)
    program = halfbyte.rewrite(export(Twice(), x))
    kinds = [node.args[8] for node in linears(program)]
    assert sorted(kinds) == ["int8_fixed"] * 3 + ["none"]
    given = [fixed_parameters(np.float32(scale), 0) for scale in (0.04, 0.5)]
    got = run_all(program, x)
    for y, of, fixed_ in (
        (got[0], x, given[0]),
        (got[1], x, given[1]),
        (got[2], x + np.float32(1), given[0]),
    ):
        assert same_bits(y, rounded_linear(of, WEIGHT, FIXED, fixed_))
    assert same_bits(got[3], linear(x, WEIGHT, 3))


@pytest.mark.parametrize("rounds", [fixed, per_tensor(False, torch.uint8), of_four_bits])
def test_any_rounding_gives_way_to_what_is_asked_for(rounds: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = random_activations(3, 5, 96)
    for activations, digits in (("none", 3), ("int8", 1)):
        program = rewritten(Quantized(WEIGHT, rounds), activations=activations)
        assert program.report.layers[0].reason == ""
        assert same_bits(run(program, x), linear(x, WEIGHT, digits))


def test_weights_per_tensor() -> None:
    class Whole(Quantized):
        def dequantized(self) -> torch.Tensor:
            return Q.dequantize_per_tensor(self.w, 0.25, 3, -128, 127, torch.int8)

    program = rewritten(Whole(EIGHT, lambda x: x))
    scale = np.full((24, 1), 0.25, np.float32)
    weight = Weight(EIGHT.codes, scale, 96, np.full((24, 1), 131, np.uint8), bias=EIGHT.bias, bits=8)
    x = random_activations(3, 5, 96)
    assert same_bits(run(program, x), linear(x, weight, 3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_torchao_makes_of_a_captured_module(dynamic: bool) -> None:
    """prepare_pt2e, calibration, convert_pt2e; names of layers come from the modules."""
    pytest.importorskip("torchao.quantization.pt2e")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(96, 40, bias=False), torch.nn.ReLU(), torch.nn.Linear(40, 24))
    x = random_activations(3, 5, 96)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    prepared = prepare_pt2e(export(model, x).module(), quantizer)
    prepared(tensor(x))
    converted = convert_pt2e(prepared)
    with torch.no_grad():
        rows = {0: torch.export.Dim("T", min=2, max=4096)}
        again = torch.export.export(converted, (tensor(x),), dynamic_shapes=(rows,))
        want = array(converted(tensor(x)))
    program = halfbyte.rewrite(again)
    assert len(linears(program)) == 2 and float_products(program) == []
    assert [row.name for row in program.report.layers] == ["0", "2"]
    for row in program.report.layers:
        if dynamic:
            assert row.mode == "W8A16" and "per tensor, with zero points" in row.reason
        else:
            assert (row.mode, row.activations, row.reason) == ("W8A8", FIXED, "")
    np.testing.assert_allclose(run(program, x), want, rtol=0, atol=2e-6 * np.abs(want).max())
