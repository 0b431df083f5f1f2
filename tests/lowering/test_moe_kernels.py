"""Experts on every body of the kernels that this machine can run, against the numpy twin, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from foreign_cpu import AnyBundle
from layer_bundles import call_layer, compile_program
from moe_twin import Experts, moe, random_experts
from numpy_twin import E4M3, TYPES, Array, Weight, same_bits, same_by_row
from random_layers import random_activations
from test_kernels import VARIANTS
from torch_bridge import layer_source

from halfbyte.lowering.kernels.generator import Glu
from halfbyte.lowering.kernels.isa import InstructionSet
from halfbyte.lowering.kernels.moe import ExpertLinear, Moe
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.passes.levels import Levels
from halfbyte.passes.program import ExpertsSource
from halfbyte.passes.scheme import Activations, Zero


@dataclass(frozen=True)
class Case:
    """Routed experts to compile. digits as for the twin."""

    name: str
    experts: Experts
    slots: int
    io: str
    digits: int

    @property
    def hidden(self) -> int:
        return int(self.experts.down[0].codes.shape[0])

    def kernels(self, isa: InstructionSet, target: Target) -> Moe:
        activations = {1: Activations.INT8, E4M3: Activations.FP8}.get(self.digits, Activations.NONE)
        digits = self.digits if self.digits in (2, 3) else 3
        sides = (_linear("up", self.experts.gate[0]), _linear("down", self.experts.down[0]))
        glu = Glu(self.experts.glu, self.experts.limit)
        count = len(self.experts.gate)
        return Moe(
            isa=isa,
            experts=count,
            slots=self.slots,
            up=sides[0],
            down=sides[1],
            io=self.io,
            activations=activations,
            digits=digits,
            glu=glu,
            platform=target.platform,
        )

    def source(self) -> ExpertsSource:
        sides = (self.experts.gate, self.experts.up, self.experts.down)
        sources = [
            [layer_source(f"{self.name}{i}", weight) for i, weight in enumerate(side)] for side in sides
        ]
        return ExpertsSource(len(self.experts.gate), *(side.__getitem__ for side in sources))


def _linear(kind: str, weight: Weight) -> ExpertLinear:
    zero = (
        Zero.INTEGER
        if weight.zero is not None
        else Zero.SYMMETRIC
        if weight.minimum is None
        else Zero.MINIMUM
    )
    scale = next(name for name, dtype in TYPES.items() if weight.scale.dtype == dtype)
    packing = Packing(*weight.codes.shape, weight.group_size, weight.bits, Levels(weight.levels))
    return ExpertLinear(kind, packing, weight.bias is not None, scale, zero)


CASES = [
    Case("int8", random_experts(1, 6, 96, 72, (32, 24), "symmetric", "f16"), 2, "f32", 1),
    Case("int8_zero_bias", random_experts(2, 5, 136, 130, (136, 130), "integer", "bf16", True), 3, "bf16", 1),
    Case("int8_minimum", random_experts(3, 3, 64, 40, (32, 40), "minimum", "f16"), 2, "f16", 1),
    Case("planes3", random_experts(4, 6, 264, 64, (128, 64), "integer", "f32"), 2, "f32", 3),
    Case("planes2", random_experts(5, 4, 96, 200, (96, 40), "symmetric", "bf16"), 4, "bf16", 2),
    Case("e4m3", random_experts(6, 7, 256, 128, (128, 128), "symmetric", "f32"), 2, "f32", E4M3),
    Case("w8", random_experts(7, 3, 72, 66, (24, 66), "integer", "f32", bits=8), 1, "f32", 1),
    Case("w8_planes", random_experts(8, 3, 72, 66, (72, 66), "symmetric", "f16", bits=8), 2, "f32", 3),
    Case("oai", random_experts(9, 4, 64, 64, (32, 32), "symmetric", "f32", True, glu="oai"), 2, "f32", 3),
    Case(
        "e2m1", random_experts(11, 5, 96, 72, (32, 24), "symmetric", "bf16", True, levels="e2m1"), 2, "f32", 1
    ),
    Case("iq4nl", random_experts(12, 3, 64, 96, (32, 32), "symmetric", "f16", levels="iq4nl"), 2, "bf16", 2),
    Case("one_expert", random_experts(10, 1, 40, 24, (8, 8), "integer", "f16"), 1, "f32", 1),
]
TOKENS = (0, 1, 2, 9, 33, 130)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.label)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    variant = request.param
    if variant.obstacle:
        pytest.skip(variant.obstacle)
    folder = tmp_path_factory.mktemp("moe") / variant.label
    return compile_experts(folder, CASES, variant.isa, CpuTarget.named(variant.cpu))


def compile_experts(
    folder: Path, cases: Iterable[Case], isa: InstructionSet, target: Target, device: str = "cpu"
) -> AnyBundle:
    """Compiles every case for a target, with the kernels of an instruction set, and loads the result."""
    layers = []
    for case in cases:
        kernels = case.kernels(isa, target)
        group = target.pack_experts(case.name, kernels, case.source())
        inputs = (((case.hidden,), case.io), ((case.slots,), "i64"), ((case.slots,), "f32"))
        layers.append((case.name, kernels, group, inputs, ((case.hidden,), case.io)))
    return compile_program(folder, layers, target, device)


def routed(case: Case, tokens: int) -> tuple[Array, Array, Array]:
    """x, ids and weights: experts without tokens, one with most of them, an id that is no expert, a NaN token."""
    random = np.random.default_rng(tokens)
    count, x = len(case.experts.gate), random_activations(tokens, tokens, case.hidden, case.io)
    x = (x.astype(np.float32) / 8).astype(x.dtype)
    ids = np.stack([random.permutation(count)[: case.slots] for _ in range(tokens)]) if tokens else None
    ids = np.zeros((0, case.slots), np.int64) if ids is None else ids.astype(np.int64)
    ids[1::2] = np.arange(case.slots)
    if count > 2:
        ids[ids == count - 2] = 0 if case.slots == 1 else count - 1
    if tokens > 8:
        ids[5, 0], ids[6, -1], x[3, 1] = count, -1, np.nan
    return x, ids, random.random((tokens, case.slots)).astype(np.float32)


@functools.cache
def expected(name: str, tokens: int) -> Array:
    """The twin's outputs for `routed` tokens, once for all kinds of devices."""
    [case] = [case for case in CASES if case.name == name]
    return moe(*routed(case, tokens), case.experts, case.digits)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_twin(kernels: AnyBundle, case: Case) -> None:
    for tokens in TOKENS:
        x, ids, weights = routed(case, tokens)
        got = call_layer(kernels, case.name, x, ids, weights)
        want = expected(case.name, tokens)
        assert same_bits(got, want), f"{tokens} tokens, wrong {same_by_row(got, want)}"
        if tokens > 8:
            bad = np.isnan(want.astype(np.float32)).any(-1)
            assert bad.sum() == 1 and bad[3]


def test_a_token_of_a_batch_equals_the_token_alone(kernels: AnyBundle) -> None:
    for case in CASES[::3]:
        x, ids, weights = routed(case, 130)
        together = call_layer(kernels, case.name, x, ids, weights)
        for token in (0, 1, 77, 129):
            part = slice(token, token + 1)
            alone = call_layer(kernels, case.name, x[part], ids[part], weights[part])
            assert same_bits(alone, together[part])
    assert together.dtype == ml_dtypes.bfloat16 or together.dtype == np.float32
