"""``halfbyte::fp8_block_moe``: the reference against the numpy twin, and as an operator of graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8_moe_twin import fp8_moe, fp8_moe_arguments, random_fp8_experts
from numpy_twin import same_bits, same_by_row
from random_layers import random_activations
from torch_bridge import array, tensor

# experts, activations, dtype of x: blocks of both sides, one scale per output, one for all; I = 72 is no multiple of 32
CASES = {
    "blocks": (random_fp8_experts(1, 5, 96, 72, ((32, 32), (32, 24))), "fp8", "f32"),
    "channels": (random_fp8_experts(2, 4, 40, 64, ((1, 0), (1, 0)), bias=True), "fp8", "bf16"),
    "tensor": (random_fp8_experts(3, 6, 64, 48, ((0, 0), (0, 0))), "none", "f16"),
    "oai": (random_fp8_experts(4, 3, 33, 24, ((16, 40), (128, 128)), bias=True, glu="oai"), "none", "f32"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_equals_the_twin(name: str, tokens: int) -> None:
    experts, activations, io = CASES[name]
    random, count = np.random.default_rng(tokens), len(experts.gate)
    x = random_activations(tokens, tokens, experts.hidden, io)
    ids = random.integers(-1, count + 1, (tokens, 3))
    weights = random.random((tokens, 3)).astype(np.float32)
    given = (tensor(x), tensor(ids), tensor(weights), *fp8_moe_arguments(experts, activations))
    got = array(torch.ops.halfbyte.fp8_block_moe(*given))
    want, _ = fp8_moe(x, ids, weights, experts, activations == "fp8")
    assert same_bits(got, want), same_by_row(got, want)


def test_it_is_an_operator_of_graphs() -> None:
    experts, activations, _ = CASES["blocks"]
    x, ids, weights = torch.randn(4, 96), torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    given = (x, ids, weights, *fp8_moe_arguments(experts, activations))
    torch.library.opcheck(
        torch.ops.halfbyte.fp8_block_moe.default, given, test_utils=("test_schema", "test_faketensor")
    )
