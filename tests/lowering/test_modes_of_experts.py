"""Every combination of int4 weights and activations, as linears and as experts: case 91; and the layer of case 87."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layer_bundles import Case as Dense
from layer_bundles import call_layer, compile_program
from moe_twin import Experts, moe, random_experts
from numpy_twin import E4M3, Array, Weight, linear, same_bits, same_by_row
from random_layers import random_activations, random_weight
from test_moe_kernels import Case

from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime import Bundle

HIDDEN, INNER = 256, 128
ACTIVATIONS = {"int8": 1, "fp8": E4M3, "float": 3}
MODES = [*itertools.product(ACTIVATIONS, ("symmetric", "integer"), (32, 128, -1))]
DENSE, EXPERTS = [], []
for seed, (activations, zero, group) in enumerate(MODES):
    digits, name = ACTIVATIONS[activations], f"{activations}_{zero}_{group}".replace("-", "c")
    groups = (HIDDEN, INNER) if group == -1 else (group, group)
    weight = random_weight(seed, 72, HIDDEN, groups[0], zero, "f16", False)
    DENSE.append(Dense(f"dense_{name}", weight, "f32", digits))
    made = random_experts(seed, 3, HIDDEN, INNER, groups, zero, "f16")
    EXPERTS.append(Case(f"moe_{name}", made, 2, "f32", digits))
# Case 87, smaller as it says: E = 16, eight of them for each of four tokens, groups of 32.
SIXTEEN = Case("sixteen", random_experts(87, 16, 256, 64, (32, 32), "integer", "f32"), 8, "f32", 3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    target, layers = CpuTarget.named("host"), []
    for dense in DENSE:
        kernels, (outputs, inputs) = dense.linear(target.isa, target), dense.weight.codes.shape
        group = target.pack(dense.name, kernels, dense.source())
        layers.append((dense.name, kernels, group, (((inputs,), "f32"),), ((outputs,), "f32")))
    for case in (*EXPERTS, SIXTEEN):
        experts = case.kernels(target.isa, target)
        packed = target.pack_experts(case.name, experts, case.source())
        takes = (((case.hidden,), "f32"), ((case.slots,), "i64"), ((case.slots,), "f32"))
        layers.append((case.name, experts, packed, takes, ((case.hidden,), "f32")))  # type: ignore[arg-type]
    return compile_program(tmp_path_factory.mktemp("modes") / "bundle", layers, target)


def routing(experts: int, slots: int, tokens: int) -> tuple[Array, Array]:
    random = np.random.default_rng(tokens)
    ids = np.array([random.permutation(experts)[:slots] for _ in range(tokens)], np.int64)
    return ids, random.random((tokens, slots)).astype(np.float32)


@pytest.mark.parametrize("index", range(len(MODES)), ids=lambda index: "-".join(map(str, MODES[index])))
def test_runs_right(bundle: Bundle, index: int) -> None:
    x = random_activations(index, 11, HIDDEN)[:, :HIDDEN] / 4
    dense, case = DENSE[index], EXPERTS[index]
    want = linear(x, dense.weight, dense.digits)
    assert same_bits(call_layer(bundle, dense.name, x), want)
    ids, weights = routing(3, 2, len(x))
    got = call_layer(bundle, case.name, x, ids, weights)
    wanted = moe(x, ids, weights, case.experts, case.digits)
    assert same_bits(got, wanted), same_by_row(got, wanted)


def test_sixteen_experts_of_which_eight_are_chosen(bundle: Bundle) -> None:
    """Case 87: against float64 with the dequantized weights."""
    random = np.random.default_rng(87)
    x = random.standard_normal((4, 256)).astype(np.float32)
    ids, weights = routing(16, 8, 4)
    got = call_layer(bundle, "sixteen", x, ids, weights).astype(np.float64)
    want = exact(x.astype(np.float64), ids, weights, SIXTEEN.experts)
    cosine = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
    assert (cosine > 0.999999).all() and np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def exact(x: Array, ids: Array, weights: Array, experts: Experts) -> Array:
    def dense(weight: Weight) -> Array:
        group = np.arange(weight.codes.shape[1]) // weight.group_size
        assert weight.zero is not None
        return (weight.codes.astype(np.float64) - weight.zero[:, group]) * weight.scale[:, group]

    out = np.zeros(x.shape)
    for token, slot in np.ndindex(*ids.shape):
        gate, up, down = (dense(side[ids[token, slot]]) for side in (experts.gate, experts.up, experts.down))
        g = gate @ x[token]
        out[token] += weights[token, slot] * (down @ (g / (1 + np.exp(-g)) * (up @ x[token])))
    return out
