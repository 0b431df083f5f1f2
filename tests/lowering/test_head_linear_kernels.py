"""The kernels of heads' own products, of every vector unit that can be run here, against numpy in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from foreign_cpu import AnyBundle, obstacle, opened
from numpy_twin import TYPES
from torch_bridge import tensor
from vulkan_device import no_device

import halfbyte
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.ops.attention_caches import padded_width
from halfbyte.passes.ops.kv_append import KINDS
from halfbyte.passes.program import Program

DEVICES = ("host", "x86-64-v3", "x86-64", "aarch64", "vulkan", "cuda")


@dataclass(frozen=True)
class Case:
    """Heads, inputs and outputs of each, columns that are kept; dtypes of rows and weights."""

    heads: int
    inputs: int
    outputs: int
    kept: int
    io: str = "f32"
    weight: str = "f32"


CASES = {
    "queries": Case(4, 128, 512, 64),
    "values": Case(4, 512, 128, 0),
    "odd": Case(3, 19, 21, 6),
    "narrow": Case(2, 16, 8, 2, "bf16", "bf16"),
    "half": Case(5, 24, 40, 8, "f16", "f16"),
    "several": Case(2, 48, 96, 3, "bf16", "f32"),
}


class Heads(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.outputs = case.outputs
        self.register_buffer("weight", tensor(weights(case)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.halfbyte.head_linear(x, self.weight, self.outputs)
        return out


def weights(case: Case) -> np.ndarray:
    """What fills up the columns is read by no result."""
    shape = (case.heads, case.inputs, padded_width(case.outputs))
    drawn = np.random.default_rng(3).standard_normal(shape).astype(TYPES[case.weight])
    drawn[..., case.outputs :] = np.nan
    return drawn


def rows(case: Case, tokens: int) -> np.ndarray:
    shape = (tokens, case.heads, case.inputs + case.kept)
    return np.random.default_rng(4).standard_normal(shape).astype(TYPES[case.io])


def export(case: Case, tokens: int | None) -> torch.export.ExportedProgram:
    """Of so many tokens, or of any number."""
    x = torch.zeros(tokens or 5, case.heads, case.inputs + case.kept, dtype=KINDS[case.io])
    dynamic = {"x": {0: torch.export.Dim("T", min=2, max=100)}} if tokens is None else None
    return torch.export.export(Heads(case), (x,), dynamic_shapes=dynamic, strict=False)


@pytest.fixture(scope="module", params=DEVICES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    device = request.param if request.param in ("vulkan", "cuda") else "cpu"
    options = halfbyte.CompileOptions(target=device)
    if device == "cpu":
        target = CpuTarget.named(request.param)
        if why := obstacle(target):
            pytest.skip(why)
        options = halfbyte.CompileOptions(cpu=request.param)
    elif no_device(device):
        pytest.skip(no_device(device))
    entries = {f"{name}_some": export(case, None) for name, case in CASES.items()}
    entries |= {f"{name}_one": export(case, 1) for name, case in CASES.items()}
    out = tmp_path_factory.mktemp("heads") / request.param
    halfbyte.compile(Program(entries), out, options)
    return opened(out, target) if device == "cpu" else halfbyte.load(out, device=device)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_reference_s(bundle: AnyBundle, name: str) -> None:
    """No row, one, and more than a workgroup takes; a row's bits are its own; kept columns keep their bits."""
    case, x = CASES[name], rows(CASES[name], 53)
    wide, weight = x.astype(np.float64), weights(case).astype(np.float64)[..., : case.outputs]
    want = np.einsum("thk,hkn->thn", wide[..., : case.inputs], weight)
    brain = case.io == "bf16"

    def run(part: np.ndarray) -> np.ndarray:
        kind = "one" if len(part) == 1 else "some"
        [y] = bundle.call(f"{name}_{kind}", part.view(np.uint16) if brain else part)
        return y.view(ml_dtypes.bfloat16) if brain and y.dtype != ml_dtypes.bfloat16 else y

    y = run(x)
    got = y[..., : case.outputs].astype(np.float64)
    limit = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}[case.io]
    error = np.abs(got - want).max((1, 2)) / np.abs(want).max()
    assert (error <= limit).all(), error.max()
    np.testing.assert_array_equal(y[..., case.outputs :], x[..., case.inputs :])
    assert run(x[:0]).shape == (0, case.heads, case.outputs + case.kept)
    for part in (slice(0, 1), slice(17, 18), slice(3, 5), slice(40, 53)):
        np.testing.assert_array_equal(run(x[part]), y[part])
