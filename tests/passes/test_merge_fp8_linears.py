"""Linears with e4m3 weights that read the same input become one, and every column stays what it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8_twin import Fp8Weight, fp8_block_linear, random_fp8_weight
from numpy_twin import same_bits
from random_layers import random_activations
from rewritten_graphs import Named, export, run_all
from torch_bridge import tensor

from halfbyte.passes.fp8_linear import Fp8BlockLinear
from halfbyte.passes.merge_linears import MergeLinears
from halfbyte.passes.pipeline import run_passes
from halfbyte.passes.program import LayerSource, Program
from halfbyte.passes.scheme import Activations
from halfbyte.passes.weight import Fp8Tensor

INPUTS = 320
# Outputs and block of q, k and v: blocks that are not full, of other heights, one per output, one for all.
BLOCKS = [(200, (128, 128)), (72, (64, 128)), (40, (1, 128)), (24, (0, 128))]


def weight_of(name: str, weight: Fp8Weight) -> Fp8Tensor:
    return Fp8Tensor(name, tensor(weight.bits), tensor(weight.scale), *weight.block)


def program_of(weights: dict[str, Fp8Weight], activations: Activations) -> Program:
    modules, layers = {}, {}
    for name, weight in weights.items():
        whole, bias = weight_of(name, weight), tensor(weight.bias)
        module = Fp8BlockLinear(
            name, whole.scheme, whole.shape, bias=bias is not None, activations=activations
        )
        modules[name] = module.fill(whole, bias)
        given = None if bias is None else (lambda bias=bias: bias)
        layers[name] = LayerSource(lambda whole=whole: whole, given, (name,))
    program = Program({"forward": export(Named(**modules), random_activations(1, 5, INPUTS))}, layers)
    run_passes(program, [MergeLinears()])
    return program


def calls(program: Program) -> int:
    target = torch.ops.halfbyte.fp8_block_linear.default
    return sum(node.target is target for node in program.entries["forward"].graph.nodes)


@pytest.mark.parametrize("activations", [Activations.FP8, Activations.NONE])
@pytest.mark.parametrize("bias", [False, True])
def test_every_column_is_computed_as_before(activations: Activations, bias: bool) -> None:
    weights = {
        name: random_fp8_weight(seed, outputs, INPUTS, block, bias=bias)
        for seed, (name, (outputs, block)) in enumerate(zip("qkvo", BLOCKS, strict=True))
    }
    program = program_of(weights, activations)
    assert program.report.merged == {"q+k+v+o": ["q", "k", "v", "o"]}
    assert calls(program) == 1
    x = random_activations(2, 6, INPUTS)
    for got, weight in zip(run_all(program, x), weights.values(), strict=True):
        want = fp8_block_linear(x, weight, activations is Activations.FP8)
        if activations is Activations.FP8:
            assert same_bits(got, want)
        else:
            assert (np.abs(got - want) <= 1e-6 * np.abs(want).max(-1, keepdims=True)).all()
    whole = program.layers["q+k+v+o"]
    joined, parts = whole.weight(), [weight_of(name, weight) for name, weight in weights.items()]
    assert isinstance(joined, Fp8Tensor)
    assert torch.equal(joined.bits, torch.cat([part.bits for part in parts]))
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert (whole.bias is not None) == bias


def test_what_differs_stays_apart() -> None:
    base = random_fp8_weight(0, 64, INPUTS, (128, 128), bias=False)
    others = {
        "inputs per block": random_fp8_weight(1, 64, INPUTS, (128, 64), bias=False),
        "bias": random_fp8_weight(1, 64, INPUTS, (128, 128), bias=True),
    }
    for what, other in others.items():
        assert program_of({"a": base, "b": other}, Activations.FP8).report.merged == {}, what


class _Own(torch.nn.Module):
    """Calls the operators itself, twice on one input, with weights that no pass has made."""

    def __init__(self, weight: Fp8Weight) -> None:
        super().__init__()
        self.register_buffer("bits", tensor(weight.bits))
        self.register_buffer("scale", tensor(weight.scale))
        self.register_buffer("nibbles", torch.zeros(16, INPUTS // 2, dtype=torch.uint8))
        self.register_buffer("steps", torch.ones(16, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fp8 = torch.ops.halfbyte.fp8_block_linear
        int4 = torch.ops.halfbyte.linear
        first, second = (fp8(x, self.bits, self.scale, None, 128, 128, "fp8") for _ in range(2))
        parts = (self.nibbles, self.steps, None, None, None, 4, INPUTS, "int8", 3, 0)
        return first, second, int4(x, *parts), int4(x, *parts)


def test_operators_of_the_graph_itself_are_left_alone() -> None:
    weight = random_fp8_weight(0, 64, INPUTS, (128, 128), bias=False)
    x = random_activations(2, 6, INPUTS)
    program = Program({"forward": export(_Own(weight), x)})
    run_passes(program, [MergeLinears()])
    assert program.report.merged == {}
    first, second, *_ = run_all(program, x)
    assert same_bits(first, second)
    assert same_bits(first, fp8_block_linear(x, weight, True))
