"""Linears whose activations are rounded as PyTorch's tools do: bit for bit on CPUs, near on GPUs, in every body."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_cpu import AnyBundle, ForeignBundle
from fused_twin import Around
from int8_twin import AFFINE, AFFINE_F32, AFFINE_F64, FIXED, SYMMETRIC, fixed_parameters, linear, taken_off
from int8_twin import rounded as codes_of
from layer_bundles import Case, call_layer, compile_program
from moe_twin import glu
from norm_twin import rms_norm
from numpy_twin import Array, Weight, flushed, same_bits, same_by_row
from numpy_twin import linear as numpy_linear
from ptx_assembler import assembled, assembler
from random_layers import random_activations, random_weight, telling_rows
from test_kernels import FEW_ROWS, VARIANTS
from vulkan_device import no_vulkan, same_values

from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.kernels.generator import Glu, RmsNorm
from halfbyte.lowering.kernels.isa import THREADS, InstructionSet
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.passes.scheme import Activations
from halfbyte.runtime.manifest import Tensor

ROWS = (0, 1, 2, 3, 4, 5, 9, 17, 97, 130)


@dataclass(frozen=True)
class Rounded:
    """A linear, and how it rounds its input."""

    case: Case
    kind: str
    fixed: Array | None = None
    around: Around = field(default_factory=Around)

    def linear(self, isa: InstructionSet, target: Target) -> Linear:
        plain, around = self.case.linear(isa, target), self.around
        return replace(
            plain,
            activations=Activations(self.kind),
            norm=None if around.norm is None else RmsNorm(around.eps, around.plus_one),
            glu=Glu(around.glu) if around.glu else None,
            residual=around.residual,
        )


def cases() -> dict[str, Rounded]:
    """Every kind of code, weight, table and dtype; shapes that no tile divides; what is fused around."""
    out: dict[str, Rounded] = {}
    norm = np.random.default_rng(1).normal(1, 0.3, 136).astype(np.float32)

    def add(kind: str, io: str, shape: tuple[int, int, int], zero: str, bits: int = 4, **more: Any) -> None:
        name, bias = f"rounded{len(out)}", more.pop("bias", False)
        scale = more.pop("scale", "f32")
        weight = random_weight(len(out), *shape, zero, scale, bias, bits, more.pop("levels", "integers"))
        if more.pop("full", False):
            weight = replace(weight, codes=np.full_like(weight.codes, 2**bits - 1))
        fixed = more.pop("fixed", fixed_parameters(0.043, -17, -128, 110) if kind == FIXED else None)
        few = more.pop("few", 0)
        case = Case(name, weight, io, 1, min_tokens=3 if few else 0, few=few or 3)
        out[name] = Rounded(case, kind, fixed, Around(**more))

    add(AFFINE, "f32", (65, 96, 32), "symmetric", bias=True)
    add(AFFINE, "bf16", (24, 136, 24), "integer")
    add(AFFINE, "f16", (70, 192, 64), "minimum", bias=True, few=2)
    add(AFFINE, "f32", (40, 1320, 1320), "integer", 8, bias=True)
    add(FIXED, "f32", (130, 520, 256), "integer", bias=True)
    add(FIXED, "bf16", (24, 136, 24), "integer", fixed=fixed_parameters(2.5, 127))
    add(FIXED, "f16", (5, 35, 35), "minimum", 8, bias=True, fixed=fixed_parameters(7e-3, -128, -128, -1))
    # All weights are the largest; codes of one row are -128 throughout: the sums that products of pairs must hold.
    add(FIXED, "f32", (65, 256, 128), "integer", bias=True, full=True)
    add(FIXED, "f16", (9, 40, 40), "minimum", 8, bias=True, full=True)
    add(SYMMETRIC, "f32", (65, 96, 32), "symmetric", 8, bias=True)
    add(SYMMETRIC, "bf16", (24, 136, 24), "integer")
    add(SYMMETRIC, "f16", (12, 3, 3), "minimum")
    add(AFFINE_F32, "bf16", (24, 136, 24), "integer")
    add(AFFINE_F32, "f16", (1, 48, 16), "minimum", 8, bias=True)
    add(AFFINE_F64, "f32", (65, 96, 32), "symmetric", bias=True)
    add(AFFINE_F64, "bf16", (24, 136, 24), "integer")
    add(AFFINE_F64, "f16", (5, 35, 35), "minimum", 8, bias=True)
    add(AFFINE, "f32", (70, 208, 16), "symmetric", bias=True, levels="e2m1")
    add(FIXED, "bf16", (40, 96, 32), "symmetric", levels="iq4nl")
    add(AFFINE, "f32", (128, 136, 24), "symmetric", norm=norm, glu="silu")
    add(FIXED, "f32", (65, 136, 24), "integer", norm=norm, residual=True)
    return out


CASES = cases()


@functools.cache
def given(name: str) -> tuple[Array, Array]:
    """x, whose second row has the least codes, with telling rows and such of one sign; what is added to the results."""
    case = CASES[name].case
    outputs, inputs = case.weight.codes.shape
    random = random_activations(inputs, max(ROWS), inputs, case.io)
    lowest = np.full((1, inputs), -6e4).astype(random.dtype)
    one_sided = (np.abs(random[3:9]), -np.abs(random[9:12]))
    x = np.concatenate([random[:1], lowest, random[1:2], telling_rows(inputs, case.io), *one_sided, random])
    return x[: max(ROWS)], random_activations(outputs, max(ROWS), outputs)


@functools.cache
def expected(name: str, few: bool) -> Array:
    """The twin's outputs of the largest batch; ``few``: of calls with less than min_tokens."""
    rounded, (x, residual) = CASES[name], given(name)
    case, around = rounded.case, rounded.around
    if few:
        return numpy_linear(x[:3], case.weight, case.few)
    if around.norm is not None:
        x = rms_norm(x, around.norm, around.eps, around.plus_one)
    y = linear(x, case.weight, rounded.kind, rounded.fixed)
    return _behind(y, around, residual)


def _behind(y: Array, around: Around, residual: Array) -> Array:
    with np.errstate(all="ignore"):
        if around.glu:
            y = glu(*np.split(y, 2, 1), around.glu, 0.0)
        return flushed(y + flushed(residual)) if around.residual else y


def compile_rounded(
    folder: Path, names: Iterable[str], isa: InstructionSet, target: Target, device: str = "cpu"
) -> AnyBundle:
    layers = []
    for name in names:
        case = CASES[name].case
        linear_ = CASES[name].linear(isa, target)
        takes: list[Any] = [((linear_.inputs,), case.io)]
        takes += [((linear_.outputs,), "f32")] * linear_.residual
        takes += [Tensor(argument.name, argument.shape, argument.dtype) for argument in linear_.more]
        group = target.pack(name, linear_, case.source())
        layers.append((name, linear_, group, tuple(takes), ((linear_.outputs,), case.io)))
    return compile_program(folder, layers, target, device)


def call(bundle: AnyBundle, name: str, rows: int) -> Array:
    rounded, (x, residual) = CASES[name], given(name)
    beside = residual[:rows] if rounded.around.residual else None
    parts = (beside, rounded.around.norm, rounded.fixed)
    return call_layer(bundle, name, x[:rows], *(part for part in parts if part is not None))


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.label)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    variant = request.param
    if variant.obstacle:
        pytest.skip(variant.obstacle)
    folder = tmp_path_factory.mktemp("rounded") / variant.label
    return compile_rounded(folder, CASES, variant.isa, CpuTarget.named(variant.cpu))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_twin(kernels: AnyBundle, name: str) -> None:
    for rows in FEW_ROWS if isinstance(kernels, ForeignBundle) else ROWS:
        got, want = call(kernels, name, rows), expected(name, rows < CASES[name].case.min_tokens)[:rows]
        assert same_bits(got, want), f"{rows} rows, wrong {same_by_row(got, want)}"


def ties(x: Array, weight: Weight) -> Array:
    """float64 [M]: the most that outputs change when inputs exactly between two codes get the other one."""
    _, scales, _ = codes_of(x, AFFINE_F64)
    with np.errstate(invalid="ignore"):
        # 24 bits over 24 bits: half a code is exact or not there
        ratio = x.astype(np.float64) / scales[:, None]
        count = (np.abs(ratio - np.trunc(ratio)) == 0.5).sum(1)
    return np.nan_to_num(count * scales.astype(np.float64) * np.abs(weight.dequantized()).max())


@pytest.fixture(scope="module")
def on_vulkan(tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    if no_vulkan():
        pytest.skip(no_vulkan())
    folder = tmp_path_factory.mktemp("vulkan") / "rounded"
    return compile_rounded(folder, CASES, THREADS, VulkanTarget.named(), "vulkan")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.around.norm is None])
def test_is_near_the_twin_on_vulkan(on_vulkan: AnyBundle, name: str) -> None:
    """Codes are equal; sums are rounded without fused operations, in proportion to what the zero point takes off.

    Codes that are computed in float64 may differ by one where an input lies exactly between two.
    """
    rounded, (x, _) = CASES[name], given(name)
    case, alone = rounded.case, None
    off = turned = np.zeros(len(x))
    if rounded.kind != SYMMETRIC:
        off = taken_off(x, case.weight, rounded.kind, rounded.fixed)
    if rounded.kind == AFFINE_F64:
        turned = ties(x, case.weight)
    unit = {"f32": 1e-6, "f16": 2.0**-10, "bf16": 2.0**-7}[case.io]
    for rows in (0, 1, 4, 5, 33, 130):
        few = rows < case.min_tokens
        got, want = call(on_vulkan, name, rows), expected(name, few)[:rows]
        made, right = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(made), np.isfinite(right))
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(made - right), posinf=0).max(1, initial=0)
        largest = np.nan_to_num(np.abs(right), posinf=0).max(1, initial=0)
        allowed = unit * largest + 1e-6 * (not few) * off[:rows] + turned[:rows]
        assert (error <= allowed).all(), f"{rows} rows"
        assert few or alone is None or same_values(got[: len(alone)], alone)
        alone = None if few else got


def test_cuda_is_assembled(tmp_path: Path) -> None:
    if assembler() is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")
    target = CudaTarget.named("sm_80")
    layers = [ArchivedLayer(name, case.linear(target.isa, target)) for name, case in CASES.items()]
    flags = [*target.flags, f"--iree-hal-dump-executable-files-to={tmp_path / 'ptx'}"]
    compile_module(layer_program(layers), flags, cache=False)
    found = assembled(tmp_path / "ptx", "sm_80", tmp_path)
    for name, entry in found.items():
        assert entry.spilled == 0 and not entry.count("div.full") and not entry.count("div.approx"), name
        if "_quantize_int8_affine" in name or ("_quantize_norm" in name and "_affine" in name):
            assert entry.count("div.rn.f32") >= 2, name
            assert entry.count("div.rn.f32") + entry.count("rcp.rn.f32") >= 3, name
        assert not entry.count("rcp.approx"), name
    assert any("_gemm_w4_int8_zeros_" in name for name in found)
