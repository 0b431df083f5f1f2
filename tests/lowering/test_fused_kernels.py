"""Linears with what is fused around them against the numpy twin, bit for bit, in every body of the kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_cpu import AnyBundle, ForeignBundle
from fused_twin import Around, fused_linear
from layer_bundles import Case, call_layer, compile_program
from numpy_twin import E4M3, Array, same_bits, same_by_row
from random_layers import random_activations, random_weight, telling_rows
from test_kernels import FEW_ROWS, VARIANTS

from halfbyte.lowering.kernels.generator import Glu, RmsNorm
from halfbyte.lowering.kernels.isa import InstructionSet
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.runtime.manifest import Tensor

ROWS = (0, 1, 2, 3, 8, 9, 17, 49, 97, 130)


@dataclass(frozen=True)
class FusedCase:
    """A linear and what is around it."""

    case: Case
    around: Around

    def linear(self, isa: InstructionSet, target: Target) -> Linear:
        around = self.around
        return replace(
            self.case.linear(isa, target),
            norm=None if around.norm is None else RmsNorm(around.eps, around.plus_one),
            glu=Glu(around.glu) if around.glu else None,
            residual=around.residual,
        )


def cases() -> dict[str, FusedCase]:
    """Every mode of activations with every fusion, every kind of zero points; rows that 64 and 16 divide, or not."""
    random, out = np.random.default_rng(1), {}

    def add(
        digits: int,
        kind: str,
        shape: tuple[int, int, int],
        bias: bool,
        bits: int = 4,
        levels: str = "integers",
        **around: Any,
    ) -> None:
        name = f"fused{len(out)}"
        normed, few = around.pop("normed", False), around.pop("few", 0)
        norm = random.normal(1, 0.3, shape[1]).astype(np.float32) if normed else None
        weight = random_weight(len(out), *shape, kind, "f16", bias, bits, levels)
        case = Case(name, weight, "f32", digits, min_tokens=3 if few else 0, few=few or 3)
        out[name] = FusedCase(case, Around(norm, **around))

    kinds = ("symmetric", "integer", "minimum")
    for number, digits in enumerate((1, 2, 3, E4M3)):
        add(digits, kinds[number % 3], (128, 96, 32), number % 2 == 0, normed=True, glu="silu")
        add(digits, kinds[(number + 1) % 3], (65, 136, 24), number % 2 == 1, residual=True)
    add(1, "minimum", (256, 192, 64), False, normed=True, glu="gelu_tanh", plus_one=True)
    add(3, "symmetric", (128, 40, 40), True, glu="gelu_tanh")
    add(1, "symmetric", (24, 320, 64), True, normed=True, residual=True, eps=1e-6)
    add(3, "integer", (70, 35, 35), False, normed=True, residual=True, plus_one=True)
    add(1, "symmetric", (64, 3, 3), False, normed=True, eps=0.0)
    add(2, "minimum", (5, 1032, 256), False, normed=True)
    add(1, "minimum", (128, 128, 64), True, bits=8, normed=True, glu="silu", few=2)
    add(1, "symmetric", (40, 1320, 1320), True, bits=8, normed=True, residual=True)
    add(3, "symmetric", (128, 96, 16), True, levels="e2m1", normed=True, glu="silu")
    add(1, "symmetric", (40, 96, 32), False, levels="iq4nl", residual=True)
    return out


CASES = cases()


def given(name: str, rows: int) -> tuple[Array, Array | None]:
    """x, telling rows after the first three, and what is added to the results."""
    outputs, inputs = CASES[name].case.weight.codes.shape
    random = random_activations(inputs, max(ROWS), inputs)
    x = np.concatenate([random[:3], telling_rows(inputs), random])[:rows]
    if not CASES[name].around.residual:
        return x, None
    return x, random_activations(outputs, max(ROWS), outputs)[:rows]


def compile_fused(
    folder: Path, names: Iterable[str], isa: InstructionSet, target: Target, device: str = "cpu"
) -> AnyBundle:
    layers = []
    for name in names:
        fused = CASES[name]
        linear = fused.linear(isa, target)
        group = target.pack(name, linear, fused.case.source())
        takes: list[Any] = [((linear.inputs,), "f32")]
        takes += [((linear.outputs,), "f32")] * linear.residual
        takes += [Tensor(argument.name, argument.shape, argument.dtype) for argument in linear.more]
        layers.append((name, linear, group, tuple(takes), ((linear.outputs,), "f32")))
    return compile_program(folder, layers, target, device)


def call_fused(bundle: AnyBundle, name: str, x: Array, residual: Array | None) -> Array:
    parts = (None if residual is None else residual[: len(x)], CASES[name].around.norm)
    return call_layer(bundle, name, x, *(part for part in parts if part is not None))


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.label)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    variant = request.param
    if variant.obstacle:
        pytest.skip(variant.obstacle)
    folder = tmp_path_factory.mktemp("fused") / variant.label
    return compile_fused(folder, CASES, variant.isa, CpuTarget.named(variant.cpu))


@functools.cache
def expected(name: str, digits: int) -> Array:
    """The twin's outputs of the largest batch, once for all bodies of the kernels."""
    x, residual = given(name, max(ROWS))
    return fused_linear(x, CASES[name].case.weight, digits, CASES[name].around, residual)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_twin(kernels: AnyBundle, name: str) -> None:
    case, (x, residual) = CASES[name].case, given(name, max(ROWS))
    for rows in FEW_ROWS if isinstance(kernels, ForeignBundle) else ROWS:
        got = call_fused(kernels, name, x[:rows], residual)
        want = expected(name, case.few if rows < case.min_tokens else case.digits)[:rows]
        assert same_bits(got, want), f"{rows} rows, wrong {same_by_row(got, want)}"
