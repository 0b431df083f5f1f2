"""Experts with e4m3 weights by every unit of this machine that multiplies floats, against the numpy twin."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from foreign_cpu import AnyBundle, obstacle
from fp8_moe_twin import Fp8Experts, fp8_moe, random_fp8_experts
from fp8_twin import Fp8Weight
from layer_bundles import call_layer, compile_program
from numpy_twin import Array, same_bits
from random_layers import random_activations
from torch_bridge import tensor
from vulkan_device import no_device, same_values

from halfbyte.lowering.kernels.fp8_moe import Fp8ExpertLinear, Fp8Moe
from halfbyte.lowering.kernels.fp8_packing import Fp8Packing
from halfbyte.lowering.kernels.generator import Glu
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.passes.program import ExpertsSource, LayerSource
from halfbyte.passes.weight import Fp8Tensor


@dataclass(frozen=True)
class Case:
    """Routed experts to compile."""

    name: str
    experts: Fp8Experts
    slots: int
    io: str
    quantized: bool

    def kernels(self, target: Target) -> Fp8Moe:
        def linear(kind: str, weight: Fp8Weight) -> Fp8ExpertLinear:
            packing = Fp8Packing(*weight.bits.shape, weight.block[1])
            return Fp8ExpertLinear(kind, packing, weight.bias is not None)

        experts = self.experts
        return Fp8Moe(
            unit=target.float_unit,
            experts=len(experts.gate),
            slots=self.slots,
            up=linear("up", experts.gate[0]),
            down=linear("down", experts.down[0]),
            io=self.io,
            quantized=self.quantized,
            glu=Glu(experts.glu, experts.limit),
            platform=target.platform,
        )

    def source(self) -> ExpertsSource:
        def linear(weight: Fp8Weight) -> LayerSource:
            found = Fp8Tensor(self.name, tensor(weight.bits), tensor(weight.scale), *weight.block)
            bias = tensor(weight.bias)
            return LayerSource(lambda: found, None if bias is None else (lambda: bias), (self.name,))

        sides = (self.experts.gate, self.experts.up, self.experts.down)
        return ExpertsSource(
            len(self.experts.gate), *([linear(weight) for weight in side].__getitem__ for side in sides)
        )


# Blocks as DeepSeek's, ragged ones, one scale per output, one for all; columns that fill no block of 64; odd numbers.
CASES = [
    Case("blocks", random_fp8_experts(1, 6, 256, 192, ((128, 128), (128, 128))), 2, "f32", True),
    Case("ragged", random_fp8_experts(2, 5, 136, 130, ((64, 48), (32, 64)), bias=True), 3, "bf16", True),
    Case("channels", random_fp8_experts(3, 7, 200, 70, ((1, 0), (1, 0))), 2, "f32", True),
    Case("tensor", random_fp8_experts(4, 3, 64, 40, ((0, 0), (0, 0)), bias=True), 2, "f16", False),
    Case("float", random_fp8_experts(5, 6, 264, 136, ((128, 128), (128, 128))), 2, "f32", False),
    Case("float16", random_fp8_experts(6, 4, 96, 66, ((32, 32), (32, 32))), 4, "bf16", False),
    Case(
        "oai", random_fp8_experts(7, 4, 72, 64, ((24, 24), (32, 32)), bias=True, glu="oai"), 2, "f32", False
    ),
    Case("one_expert", random_fp8_experts(8, 1, 40, 24, ((8, 8), (8, 8))), 1, "f32", True),
]
TOKENS = (0, 1, 2, 9, 33, 130)
CASTS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


CPUS = ("host", "amx", "avx512bf16", "x86-64-v4", "x86-64-v3", "x86-64", "aarch64")
GPUS: dict[str, Target] = {"vulkan": VulkanTarget.named(), "cuda": CudaTarget.named()}


@pytest.fixture(scope="module", params=[*CPUS, *GPUS])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    folder = tmp_path_factory.mktemp("moe") / "bundle"
    if request.param in GPUS:
        if no_device(request.param):
            pytest.skip(no_device(request.param))
        return _compiled(folder, GPUS[request.param], request.param)
    target = CpuTarget.named(request.param)
    if why := obstacle(target):
        pytest.skip(why)
    return _compiled(folder, target, "cpu")


def _compiled(folder: Path, target: Target, device: str) -> AnyBundle:
    layers = []
    for case in CASES:
        moe, hidden = case.kernels(target), case.experts.hidden
        group = target.pack_experts(case.name, moe, case.source())
        inputs = (((hidden,), case.io), ((case.slots,), "i64"), ((case.slots,), "f32"))
        layers.append((case.name, moe, group, inputs, ((hidden,), case.io)))
    return compile_program(folder, layers, target, device)


def routed(case: Case, tokens: int) -> tuple[Array, Array, Array]:
    """x, ids and weights: experts without tokens, one with most of them, an id that is no expert, a NaN token."""
    random = np.random.default_rng(tokens)
    count, x = len(case.experts.gate), random_activations(tokens, tokens, case.experts.hidden, case.io)
    ids = np.array([random.permutation(count)[: case.slots] for _ in range(tokens)], np.int64)
    ids = ids.reshape(tokens, case.slots)
    ids[1::2] = np.arange(case.slots)
    if count > case.slots + 1:
        ids[ids == count - 2] = count - 1
    if tokens > 8:
        ids[5, 0], ids[6, -1], x[3, 1], x[4] = count, -1, np.nan, 0
    return x, ids, random.random((tokens, case.slots)).astype(np.float32)


@functools.cache
def expected(number: int, tokens: int) -> tuple[Array, Array]:
    """Once for all kinds of CPU."""
    case = CASES[number]
    return fp8_moe(*routed(case, tokens), case.experts, case.quantized)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_near_the_twin(kernels: AnyBundle, case: Case) -> None:
    ulp = 0.0 if case.io == "f32" else 2 * float(ml_dtypes.finfo(CASTS[case.io]).eps)
    for tokens in TOKENS:
        x, ids, weights = routed(case, tokens)
        got = call_layer(kernels, case.name, x, ids, weights).astype(np.float64)
        made, allowed = expected(CASES.index(case), tokens)
        want = made.astype(np.float64)
        bad = ~np.isfinite(want)
        np.testing.assert_array_equal(~np.isfinite(got), bad)
        if tokens > 8:
            assert bad.all(-1).sum() == 1 and bad[3].all()
        off = np.where(bad, 0, np.abs(got - want))
        assert (off <= allowed + ulp * np.where(bad, 0, np.abs(want))).all(), (tokens, off.max())
        largest = np.where(bad, 0, np.abs(want)).max(-1, initial=0)
        assert (allowed.max(-1, initial=0) <= 0.2 * largest + (largest == 0)).all()
        flipped = off.max(-1, initial=0) > (1e-5 + ulp) * largest
        assert tokens < 30 or flipped.mean() < 0.1  # codes of the product on the other side of a tie


def test_a_token_of_a_batch_equals_the_token_alone(kernels: AnyBundle) -> None:
    same = same_values if kernels.manifest.programs[0].target in GPUS else same_bits
    for case in CASES:
        x, ids, weights = routed(case, 130)
        together = call_layer(kernels, case.name, x, ids, weights)
        for token in (0, 1, 77, 129):
            part = slice(token, token + 1)
            alone = call_layer(kernels, case.name, x[part], ids[part], weights[part])
            assert same(alone, together[part])
