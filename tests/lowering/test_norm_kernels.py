"""Norms by themselves against the numpy twin: on CPUs bit for bit, on GPUs to a rounding, each row by itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from foreign_cpu import AnyBundle, ForeignBundle, obstacle, opened
from norm_twin import rms_norm
from numpy_twin import TYPES, Array, same_bits, same_by_row
from ptx_assembler import assembled, assembler
from random_layers import random_activations, telling_rows
from torch_bridge import array, tensor
from vulkan_device import far_rows, no_device, same_values

import halfbyte
from halfbyte.lowering.targets.cpu import CpuTarget

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
EPS = 1e-5


@dataclass(frozen=True)
class Kind:
    """A norm: ``heads`` times ``width`` columns from ``first`` on, or whole rows where ``heads`` is 0."""

    width: int
    io: str
    weight: str | None = "f32"
    plus_one: bool = False
    rounds: bool = False
    heads: int = 0
    first: int = 0
    columns: int = 0

    @property
    def inputs(self) -> int:
        return self.columns or self.width

    def given(self, rows: int) -> Array:
        """Telling rows behind three ordinary ones."""
        random = random_activations(self.inputs, 80, self.inputs, self.io)
        return np.concatenate([random[:3], telling_rows(self.inputs, self.io), random])[:rows]

    def factor(self) -> Array | None:
        if self.weight is None:
            return None
        random = np.random.default_rng(self.width)
        return random.normal(not self.plus_one, 0.3, self.width).astype(TYPES[self.weight])

    def expected(self, x: Array, fuses: bool = True) -> Array:
        heads = x[:, self.first : self.first + self.heads * self.width] if self.heads else x
        normed = rms_norm(
            heads.reshape(-1, self.width), self.factor(), EPS, self.plus_one, self.rounds, fuses
        )
        return normed.reshape(len(x), -1)


# Every dtype in the forms that models have, of widths that 64 and 16 divide, or not; and heads in wider rows.
KINDS = (
    *(Kind(width, "f32", plus_one=width % 3 == 1) for width in (1, 7, 64, 80, 128, 200, 576, 896, 2056)),
    *(Kind(width, "f16", "f16", rounds=True) for width in (7, 128, 200)),
    *(Kind(width, "bf16", "bf16", rounds=True) for width in (80, 128, 576)),
    *(Kind(width, "bf16", "bf16", plus_one=True) for width in (64, 200)),
    *(Kind(128, "f16", "f32"), Kind(576, "bf16", "f32"), Kind(64, "f32", "bf16"))[:3],
    *(Kind(width, "f32", None) for width in (80, 896)),
    *(Kind(width, "bf16", None) for width in (7, 128)),
    *(
        Kind(64, "f32", heads=3, first=64, columns=320),
        Kind(80, "bf16", "bf16", heads=2, first=7, columns=170),
    ),
    *(Kind(7, "f16", "f16", heads=5, columns=36), Kind(200, "f32", heads=1, first=3, columns=207)),
)
ROWS = (0, 1, 2, 3, 5, 14, 94)


class Norms(torch.nn.Module):
    """All kinds in one program."""

    def __init__(self) -> None:
        super().__init__()
        for i, kind in enumerate(KINDS):
            if kind.weight is not None:
                self.register_buffer(f"w{i}", tensor(kind.factor()))

    def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = []
        for i, (x, kind) in enumerate(zip(xs, KINDS, strict=True)):
            settings = (getattr(self, f"w{i}", None), EPS, kind.plus_one, kind.rounds)
            if kind.heads:
                columns = (kind.first, kind.heads, kind.width)
                out.append(torch.ops.halfbyte.rms_norm_merged(x, *columns, *settings))
            else:
                out.append(torch.ops.halfbyte.rms_norm(x, *settings))
        return tuple(out)


def compiled(folder: Path, options: halfbyte.CompileOptions) -> Path:
    rows = torch.export.Dim("T", min=0, max=4096)
    xs = tuple(torch.zeros(2, kind.inputs, dtype=TORCH[kind.io]) for kind in KINDS)
    program = torch.export.export(Norms(), xs, dynamic_shapes=(tuple({0: rows} for _ in xs),))
    return halfbyte.compile(program, folder, options).path


def called(bundle: AnyBundle, xs: Sequence[Array]) -> list[Array]:
    half = np.dtype(ml_dtypes.bfloat16)
    out = bundle.call("forward", *(x.view(np.uint16) if x.dtype == half else x for x in xs))
    return [y.view(half) if x.dtype == half else y for x, y in zip(xs, out, strict=True)]


CPUS = ("host", "x86-64", "x86-64-v3", "x86-64-v4", "aarch64")


@pytest.mark.parametrize("cpu", CPUS)
def test_cpus_equal_the_twin(cpu: str, tmp_path: Path) -> None:
    target = CpuTarget.named(cpu)
    if obstacle(target):
        pytest.skip(obstacle(target))
    bundle = opened(compiled(tmp_path / "out", halfbyte.CompileOptions(cpu=cpu)), target)
    for rows in (0, 14) if isinstance(bundle, ForeignBundle) else ROWS:
        xs = [kind.given(rows) for kind in KINDS]
        for kind, x, got in zip(KINDS, xs, called(bundle, xs), strict=True):
            want = wanted(kind)[:rows]
            assert same_bits(got, want), f"{kind}, {rows} rows, wrong {same_by_row(got, want)}"
            assert same_bits(x, kind.given(rows))


@functools.cache
def wanted(kind: Kind, fuses: bool = True) -> Array:
    return kind.expected(kind.given(max(ROWS)), fuses)


@pytest.mark.parametrize("device", ["vulkan", "cuda"])
def test_gpus_are_near_the_twin(device: str, tmp_path: Path) -> None:
    if no_device(device):
        pytest.skip(no_device(device))
    options = halfbyte.CompileOptions(target=device)
    bundle = halfbyte.load(compiled(tmp_path / "out", options), device=device)
    most = called(bundle, [kind.given(max(ROWS)) for kind in KINDS])
    for kind, got in zip(KINDS, most, strict=True):
        far = [far_rows(got, wanted(kind, fuses)) for fuses in (True, False)]
        assert [] in far, f"{kind}, wrong {far}"
    for rows in ROWS[:-1]:
        for kind, got, many in zip(
            KINDS, called(bundle, [kind.given(rows) for kind in KINDS]), most, strict=True
        ):
            assert same_values(got, many[:rows]), f"{kind}, {rows} rows"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_ptx_is_assembled_and_divides_exactly(architecture: str, tmp_path: Path) -> None:
    if assembler() is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")
    dump = f"--iree-hal-dump-executable-files-to={tmp_path / 'ptx'}"
    options = halfbyte.CompileOptions(target="cuda", cuda_arch=architecture, iree_flags=(dump,), cache=False)
    compiled(tmp_path / "out", options)
    kernels = assembled(tmp_path / "ptx", architecture, tmp_path)
    assert len(kernels) == len({name for name in kernels if name.startswith("halfbyte_rms_norm")}) > 20
    for name, kernel in kernels.items():
        assert kernel.spilled == 0 and kernel.count("sqrt.rn.f32") == 1, name
        assert kernel.count("rcp.rn.f32") + kernel.count("div.rn.f32") >= 1, name
        for rough in ("div.full", "div.approx", "rcp.approx", "sqrt.approx", "rsqrt.approx"):
            assert kernel.count(rough) == 0, name


def test_the_reference_equals_the_twin() -> None:
    module = Norms()
    xs = [kind.given(max(ROWS)) for kind in KINDS]
    for kind, got in zip(KINDS, module(*map(tensor, xs)), strict=True):
        assert same_bits(array(got), wanted(kind)), kind
