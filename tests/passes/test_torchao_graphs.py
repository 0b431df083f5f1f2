"""Models that torchao quantized, exported as they are: weights in its tensor subclasses, or unwrapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from fp8_twin import Fp8Weight, fp8_block_linear
from int8_twin import AFFINE, FIXED, SYMMETRIC, fixed_parameters
from int8_twin import linear as rounded_linear
from numpy_twin import Array, Weight, linear, same_bits
from random_layers import random_activations
from rewritten_graphs import Named, export, float_products, linears, run, state
from torch_bridge import array, nibbles, tensor

import halfbyte
from halfbyte.passes.program import Program

torchao = pytest.importorskip("torchao.quantization")

OUTPUTS, INPUTS = 40, 96


@dataclass(frozen=True)
class Kind:
    """A way of quantizing: torchao's configuration, and what becomes of it.

    Attributes:
        weight: what torchao's tensor holds, read by hand.
        mode: what the report calls it.
        rounds: how the graph rounds the input, and the kernels.
        bias_apart: torchao adds the bias by an operation of its own.
        near: of the largest output, how far torchao's own result may be away.
    """

    config: Callable[[], object]
    weight: Callable[[torch.Tensor], Weight | Fp8Weight]
    mode: str
    rounds: str = ""
    bias_apart: bool = False
    near: float = 4e-6


def _intx(weight: torch.Tensor) -> Weight:
    codes, scale, zero = (array(part) for part in (weight.qdata, weight.scale, weight.zero_point))
    bits = 4 if codes.min() >= -8 and codes.max() <= 7 else 8
    shift = 2 ** (bits - 1)
    offset = None if not zero.any() else (zero.astype(np.int64) + shift).astype(np.uint8)
    return Weight(
        (codes.astype(np.int64) + shift).astype(np.uint8),
        scale,
        codes.shape[1] // scale.shape[1],
        offset,
        bits=bits,
    )


def _int8(weight: torch.Tensor) -> Weight:
    codes, scale = array(weight.qdata), array(weight.scale)
    assert scale.shape == (len(codes), 1)
    return Weight((codes.astype(np.int64) + 128).astype(np.uint8), scale, codes.shape[1], bits=8)


def _e4m3(weight: torch.Tensor) -> Fp8Weight:
    return Fp8Weight(array(weight.qdata.view(torch.uint8)), array(weight.scale), (1, INPUTS), None)


def _groups(asymmetric: bool = False, dynamic: bool = False) -> object:
    mapping = torchao.MappingType.ASYMMETRIC if asymmetric else torchao.MappingType.SYMMETRIC
    group = torchao.PerGroup(32)
    if dynamic:
        return torchao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=group, weight_mapping_type=mapping
        )
    return torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group, mapping_type=mapping)


KINDS = {
    "int4": Kind(_groups, _intx, "W4A16"),
    "int4 asymmetric": Kind(lambda: _groups(asymmetric=True), _intx, "W4A16"),
    "int4 channelwise": Kind(
        lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerAxis(0)),
        _intx,
        "W4A16",
    ),
    "8da4w": Kind(lambda: _groups(dynamic=True), _intx, "W4A8", AFFINE),
    "8da4w asymmetric": Kind(lambda: _groups(asymmetric=True, dynamic=True), _intx, "W4A8", AFFINE),
    "int8": Kind(lambda: torchao.Int8WeightOnlyConfig(), _int8, "W8A16", bias_apart=True),
    "int8 dynamic": Kind(
        lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
        _int8,
        "W8A8",
        SYMMETRIC,
        bias_apart=True,
    ),
    "e4m3": Kind(lambda: torchao.Float8WeightOnlyConfig(), _e4m3, "WFP8A16", bias_apart=True),
}


def quantized(kind: Kind, bias: bool, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    module = Named(layer=torch.nn.Linear(INPUTS, OUTPUTS, bias=bias)).eval().to(dtype)
    torchao.quantize_(module, kind.config())
    return module


def wanted(kind: Kind, weight: Weight | Fp8Weight, bias: Array | None, x: Array, digits: int) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    inside = None if kind.bias_apart else bias
    if isinstance(weight, Fp8Weight):
        y = fp8_block_linear(rows, weight, False)
    else:
        alone = replace(weight, bias=inside)
        y = rounded_linear(rows, alone, kind.rounds) if kind.rounds else linear(rows, alone, digits)
    if bias is not None and kind.bias_apart:
        y = (y.astype(np.float32) + bias.astype(np.float32)).astype(y.dtype)
    return y.reshape(*x.shape[:-1], -1)


def check(program: Program, kind: Kind, bias: bool) -> None:
    assert float_products(program) == [] and program.report.refusals == []
    [row] = program.report.layers
    assert (row.name, row.shape, row.mode, row.reason) == ("layer", (OUTPUTS, INPUTS), kind.mode, "")
    assert row.activations == (kind.rounds or "none") and program.report.warnings == []
    left = {name.rpartition(".")[2] for name in program.entries["forward"].state_dict}
    assert left <= {"codes", "scale", "zero", "bias"}  # nothing of torchao's


@pytest.mark.parametrize("unwrapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_weights_and_results(name: str, bias: bool, unwrapped: bool) -> None:
    kind = KINDS[name]
    module = quantized(kind, bias)
    weight, known = kind.weight(module.layer.weight), array(module.layer.bias) if bias else None
    x = random_activations(3, 9, INPUTS)
    with torch.no_grad():
        eager = array(module(tensor(x)))
    if unwrapped:
        from torchao.utils import unwrap_tensor_subclass

        module = unwrap_tensor_subclass(module)
    program = halfbyte.rewrite(export(module, x))
    check(program, kind, bias)
    if isinstance(weight, Weight):
        packed = nibbles(weight.codes) if weight.bits == 4 else weight.codes
        np.testing.assert_array_equal(state(program, "layer.codes"), packed)
        zero = state(program, "layer.zero")
        assert (zero is None) == (weight.zero is None)
        if zero is not None:
            np.testing.assert_array_equal(zero, weight.zero)
    for rows in (1, 5, 9):
        got, want = run(program, x[:rows]), wanted(kind, weight, known, x[:rows], 3)
        if isinstance(weight, Weight):
            assert same_bits(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
        assert np.abs(got - eager[:rows]).max() <= kind.near * np.abs(eager[:rows]).max()


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_and_several_sequences(name: str) -> None:
    """torchao's products of integers are of two dimensions, whatever the input has."""
    kind = KINDS[name]
    module = quantized(kind, True, torch.bfloat16)
    weight, known = kind.weight(module.layer.weight), array(module.layer.bias)
    x = random_activations(3, 10, INPUTS, "bf16").reshape(2, 5, INPUTS)
    program = halfbyte.rewrite(export(module, x))
    check(program, kind, True)
    got, want = run(program, x), wanted(kind, weight, known, x, 2)
    if isinstance(weight, Weight):
        assert same_bits(got, want)
    with torch.no_grad():
        eager = array(module(tensor(x))).astype(np.float32)
    off = np.abs(got.astype(np.float32) - eager).max()
    assert off <= (kind.near + 2**-6) * np.abs(eager).max()


@pytest.mark.parametrize(
    ("name", "activations", "mode", "digits"),
    [
        ("8da4w", "none", "W4A16", 3),
        ("8da4w", "int8", "W4A8", 1),
        ("int8 dynamic", "none", "W8A16", 3),
        ("int4", "int8", "W4A8", 1),
    ],
)
def test_activations_as_asked_for(name: str, activations: str, mode: str, digits: int) -> None:
    kind = KINDS[name]
    module = quantized(kind, False)
    x = random_activations(3, 5, INPUTS)
    program = halfbyte.rewrite(export(module, x), activations=activations)
    assert program.report.layers[0].mode == mode and program.report.warnings == []
    assert same_bits(run(program, x), linear(x, kind.weight(module.layer.weight), digits))


def test_linears_of_one_input_become_one() -> None:
    """Each has rounded the input for itself."""
    torch.manual_seed(2)
    module = Named(a=torch.nn.Linear(INPUTS, 24), b=torch.nn.Linear(INPUTS, 40)).eval()
    torchao.quantize_(module, _groups(dynamic=True))
    x = random_activations(3, 5, INPUTS)
    weights = [replace(_intx(layer.weight), bias=array(layer.bias)) for layer in module.children()]
    program = halfbyte.rewrite(export(module, x))
    assert len(linears(program)) == 1
    assert program.report.warnings == []
    got = program.entries["forward"].module()(tensor(x))
    for part, weight in zip(got, weights, strict=True):
        assert same_bits(array(part), rounded_linear(x, weight, AFFINE))


def test_a_module_goes_in_as_it_is() -> None:
    kind = KINDS["8da4w"]
    module = quantized(kind, True)
    x = random_activations(3, 5, INPUTS)
    program = halfbyte.rewrite(module, (tensor(x),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    check(program, kind, True)


def test_static_scales() -> None:
    """A product of integers, whose input has one scale that is known before."""
    module = quantized(
        replace(
            KINDS["int8"],
            config=lambda: torchao.Int8StaticActivationInt8WeightConfig(
                act_quant_scale=torch.tensor([[0.03]]), granularity=torchao.PerTensor()
            ),
        ),
        True,
    )
    codes, scale = array(module.layer.weight.qdata), array(module.layer.weight.scale)
    whole = np.broadcast_to(scale, (OUTPUTS, 1)).astype(np.float32)
    weight = Weight((codes.astype(np.int64) + 128).astype(np.uint8), whole, INPUTS, bits=8)
    x = random_activations(3, 9, INPUTS)
    with torch.no_grad():
        eager = array(module(tensor(x)))
    program = halfbyte.rewrite(export(module, x))
    [row] = program.report.layers
    assert (row.mode, row.activations, program.report.warnings) == ("W8A8", FIXED, [])
    got = run(program, x)
    want = rounded_linear(x, weight, FIXED, fixed_parameters(np.float32(0.03), 0))
    assert same_bits(got, want + array(module.layer.bias))
    assert np.abs(got - eager).max() <= 4e-6 * np.abs(eager).max()


class _Chosen(torch.nn.Module):
    """An int4 linear of torchao's whose input is rounded by its operators with settings that vary."""

    def __init__(self, mapping: str, **settings: object) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(INPUTS, OUTPUTS)
        torchao.quantize_(self.layer, _groups())
        self.mapping, self.settings = torchao.MappingType[mapping], settings
        self.least = settings.pop("least", -128)
        self.like: object = settings.pop("like", None)  # the dtype that the scale is cast to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization import quant_primitives as primitives

        given = ((1, x.shape[1]), torch.int8, self.least, 127)
        scale, zero = primitives.choose_qparams_affine(x, self.mapping, *given, **self.settings)
        scale = scale if self.like is None else scale.to(self.like).float()
        codes = primitives.quantize_affine(x, given[0], scale, zero, *given[1:])
        return self.layer(primitives.dequantize_affine(codes, given[0], scale, zero, *given[1:]))


@pytest.mark.parametrize(
    ("mapping", "settings", "activations", "warned"),
    [
        ("ASYMMETRIC", {}, AFFINE, ""),
        ("ASYMMETRIC", {"eps": 2.0**-23}, "int8_affine_f32", ""),
        ("ASYMMETRIC", {"eps": 1e-5}, "int8", "with zero points"),
        ("ASYMMETRIC", {"like": torch.bfloat16}, "int8", "with zero points"),
        ("SYMMETRIC", {"eps": 2.0**-23}, SYMMETRIC, ""),
        ("SYMMETRIC", {}, "int8", "absmax / 127.5"),
        ("SYMMETRIC", {"eps": 1e-5, "least": -127}, "int8", ""),
        ("SYMMETRIC_NO_CLIPPING_ERR", {}, "int8", "of each sign's own range"),
    ],
)
def test_only_the_very_same_rounding_is_the_kernels(
    mapping: str, settings: dict[str, object], activations: str, warned: str
) -> None:
    module, x = _Chosen(mapping, **settings).eval(), random_activations(3, 5, INPUTS)
    with torch.no_grad():
        eager = array(module(tensor(x)))
    program = halfbyte.rewrite(export(module, x))
    [row] = program.report.layers
    assert (row.mode, row.activations) == ("W4A8", activations)
    assert [warned in warning for warning in program.report.warnings] == [True] * bool(warned)
    near = 0.02 if activations == "int8" else 4e-6
    np.testing.assert_allclose(run(program, x), eager, rtol=0, atol=near * np.abs(eager).max())
