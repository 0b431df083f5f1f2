"""``halfbyte::moe``: the reference against the numpy twin, and as an operator of graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from moe_twin import exponential, glu, moe, random_experts
from numpy_twin import E4M3, Array, same_bits, same_by_row
from random_layers import random_activations
from torch_bridge import array, moe_arguments, tensor

from halfbyte.passes.ops import swiglu

CASES = {
    "int8": (random_experts(1, 5, 96, 72, (32, 24), "symmetric", "f16"), "int8", 3, 1, "f32"),
    "planes": (random_experts(2, 4, 40, 64, (40, 64), "integer", "bf16", True), "none", 2, 2, "bf16"),
    "fp8": (random_experts(3, 6, 64, 48, (32, 48), "minimum", "f32"), "fp8", 3, E4M3, "f16"),
    "oai": (random_experts(4, 3, 33, 24, (33, 8), "symmetric", "f32", True, glu="oai"), "none", 3, 3, "f32"),
    "e2m1": (
        random_experts(6, 3, 64, 48, (32, 16), "symmetric", "bf16", levels="e2m1"),
        "fp8",
        3,
        E4M3,
        "f32",
    ),
    "w8": (random_experts(5, 2, 32, 24, (8, 24), "integer", "f32", bits=8), "int8", 3, 1, "f32"),
}


def operator(x: Array, ids: Array, weights: Array, *rest: object) -> Array:
    return array(torch.ops.halfbyte.moe(tensor(x), tensor(ids), tensor(weights), *rest))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_equals_the_twin(name: str, tokens: int) -> None:
    experts, activations, digits, twin_digits, io = CASES[name]
    random, count = np.random.default_rng(tokens), len(experts.gate)
    x = random_activations(tokens, tokens, experts.down[0].codes.shape[0], io)
    ids = random.integers(-1, count + 1, (tokens, 3))
    weights = random.random((tokens, 3)).astype(np.float32)
    got = operator(x, ids, weights, *moe_arguments(experts, activations, digits))
    want = moe(x, ids, weights, experts, twin_digits)
    assert same_bits(got, want), same_by_row(got, want)


@pytest.mark.parametrize("kind", ["silu", "oai"])
def test_the_product_of_gate_and_up(kind: str) -> None:
    """Near torch's own, equal to the twin's, everywhere."""
    gate = np.linspace(-100, 100, 4001).astype(np.float32)
    up = np.random.default_rng(0).normal(size=gate.shape).astype(np.float32) * 4
    got = array(swiglu.swiglu(tensor(gate), tensor(up), kind, 7.0))
    assert same_bits(got, glu(gate, up, kind, 7.0))
    wide, wide_up = tensor(gate).double(), tensor(up).double()
    if kind == "oai":
        wide, wide_up = wide.clamp(max=7), wide_up.clamp(-7, 7)
        want = (wide_up + 1) * wide * torch.sigmoid(1.702 * wide)
    else:
        want = torch.nn.functional.silu(wide) * wide_up
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-35)


def test_the_exponential() -> None:
    z = np.linspace(-87, 88, 20001).astype(np.float32)
    assert same_bits(array(swiglu.exponential(tensor(z))), exponential(z))
    np.testing.assert_allclose(exponential(z), np.exp(z.astype(np.float64)), rtol=3e-7)


def test_it_is_an_operator_of_graphs() -> None:
    experts, activations, digits, _, _ = CASES["int8"]
    x, ids, weights = torch.randn(4, 96), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    given = (x, ids, weights, *moe_arguments(experts, activations, digits))
    torch.library.opcheck(
        torch.ops.halfbyte.moe.default, given, test_utils=("test_schema", "test_faketensor")
    )


def test_experts_have_no_rounding_but_their_own() -> None:
    experts, _, digits, _, _ = CASES["int8"]
    given = (torch.randn(4, 96), torch.tensor([[0, 1]] * 4), torch.rand(4, 2))
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match="of experts must be int8, fp8 or none, not 'int8_affine'"),
    ):
        torch.ops.halfbyte.moe(*given, *moe_arguments(experts, "int8_affine", digits))
