"""Products with a packed weight in one operator of aten, and e4m3 weights in plain operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8_twin import Fp8Weight, fp8_block_linear, random_fp8_weight
from numpy_twin import TYPES, Array, Weight, linear, same_bits
from random_layers import random_activations, random_weight
from rewritten_graphs import Named, export, float_products, linears, run, state
from torch_bridge import array, nibbles, tensor

import halfbyte
from halfbyte.passes.program import Program, layer_nodes


class Int4Packed(torch.nn.Module):
    """As gpt-fast and torchao's CPU layout have it: an order of torch's own, (codes - 8) * scale + zero."""

    def __init__(self, codes: Array, scale: Array, zero: Array, group_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(tensor(codes.astype(np.int32)), 1)
        self.group_size = group_size
        self.register_buffer("packed", packed)
        both = torch.stack([tensor(scale.T), tensor(zero.T)], -1)
        self.register_buffer("scales_and_zeros", both.to(dtype).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, self.group_size, self.scales_and_zeros
        )


@pytest.mark.parametrize(("io", "digits", "limit"), [("f32", 3, 4e-6), ("bf16", 2, 2e-2), ("f16", 2, 4e-3)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_packed_for_cpus(io: str, digits: int, limit: float, symmetric: bool) -> None:
    weight = random_weight(1, 48, 128, 32, "minimum")
    scale = weight.scale.astype(TYPES[io]).astype(np.float32)
    zero = np.zeros_like(scale) if symmetric else weight.minimum.astype(TYPES[io]).astype(np.float32)
    x = random_activations(3, 5, 128, io)
    module = Int4Packed(weight.codes, scale, zero, 32, tensor(x).dtype)
    program = halfbyte.rewrite(export(Named(layer=module), x))
    assert len(linears(program)) == 1 and program.report.refusals == []
    [row] = program.report.layers
    assert (row.name, row.shape, row.mode) == ("layer", (48, 128), "W4A16")
    assert ("symmetric" if symmetric else "minimum") in row.scheme
    np.testing.assert_array_equal(state(program, "layer.codes"), nibbles(weight.codes))
    least = None if symmetric else zero - np.float32(8) * scale
    want = linear(x, Weight(weight.codes, scale, 32, minimum=least), digits)
    got = run(program, x)
    assert same_bits(got, want)
    with torch.no_grad():
        eager = array(module(tensor(x))).astype(np.float32)
    assert np.abs(got.astype(np.float32) - eager).max() <= limit * np.abs(eager).max()


def test_int8_beside_scales() -> None:
    weight = random_weight(2, 48, 128, 128, "symmetric", bits=8)

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", tensor((weight.codes.astype(np.int64) - 128).astype(np.int8)))
            self.register_buffer("scales", tensor(weight.scale[:, 0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scales)

    x = random_activations(3, 5, 128)
    program = halfbyte.rewrite(export(Named(layer=Packed()), x))
    assert program.report.layers[0].mode == "W8A16"
    assert same_bits(run(program, x), linear(x, weight, 3))


class E4m3(torch.nn.Module):
    """A weight of e4m3 in blocks, dequantized as people write it."""

    def __init__(self, weight: Fp8Weight, spelling: str) -> None:
        super().__init__()
        self.weight, self.spelling = weight, spelling
        self.register_buffer("w", tensor(weight.bits).view(torch.float8_e4m3fn))
        self.register_buffer("s", tensor(weight.scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.weight.bits.shape
        rows, columns = (
            size or whole for size, whole in zip(self.weight.block, (outputs, inputs), strict=True)
        )
        scale = self.s.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        if self.spelling == "linear":
            return torch.nn.functional.linear(x, self.w.to(x.dtype) * scale)
        if self.spelling == "matmul":
            return x @ (self.w.t().to(torch.float32) * scale.t()).to(x.dtype)
        return (x @ self.w.to(x.dtype).t()) * self.s.flatten()


def fp8_program(weight: Fp8Weight, spelling: str, x: Array, **options: str) -> Program:
    return halfbyte.rewrite(export(Named(layer=E4m3(weight, spelling)), x), **options)


@pytest.mark.parametrize("activations", ["none", "fp8"])
@pytest.mark.parametrize(
    ("spelling", "shape", "block"),
    [
        ("linear", (200, 320), (128, 128)),
        ("matmul", (40, 96), (1, 96)),
        ("linear", (72, 130), (72, 130)),
        ("product first", (40, 96), (1, 96)),
    ],
)
def test_e4m3_weights(
    spelling: str, shape: tuple[int, int], block: tuple[int, int], activations: str
) -> None:
    weight = random_fp8_weight(5, *shape, block, bias=False)
    x = random_activations(3, 7, shape[1])
    program = fp8_program(weight, spelling, x, activations=activations)
    assert float_products(program) == [] and program.report.refusals == []
    assert len(list(layer_nodes(program.entries["forward"].graph))) == 1
    [row] = program.report.layers
    assert (row.name, row.shape) == ("layer", shape)
    assert row.mode == {"none": "WFP8A16", "fp8": "WFP8AFP8"}[activations]
    assert f"blocks of {block[0]}x{block[1]}" in row.scheme
    np.testing.assert_array_equal(state(program, "layer.codes"), weight.bits)
    want = fp8_block_linear(x, weight, activations == "fp8")
    np.testing.assert_allclose(run(program, x), want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_e4m3_weights_refuse_int8_activations_and_nan() -> None:
    weight = random_fp8_weight(5, 40, 96, (1, 96), bias=False)
    x = random_activations(3, 7, 96)
    [refusal] = fp8_program(weight, "linear", x, activations="int8").report.refusals
    assert "int8 activations" in refusal.found and refusal.accepted == "none or fp8"
    weight.bits[3, 5] = 0x7F
    [refusal] = fp8_program(weight, "linear", x).report.refusals
    assert "NaN" in refusal.found
