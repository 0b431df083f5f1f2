"""Norms, products and residuals around linears become one operator of the same bits; what does not fit stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from dequantizing_models import GroupedLinear
from fused_twin import Around, fused_linear
from numpy_twin import Array, same_bits
from random_layers import random_activations, random_weight, telling_rows
from rewritten_graphs import export, linears, run
from torch_bridge import array, linear_arguments, tensor

from halfbyte.passes.find_dequantized_linears import FindDequantizedLinears
from halfbyte.passes.fuse_linears import FuseLinears
from halfbyte.passes.merge_linears import MergeLinears
from halfbyte.passes.ops.rms_norm import rms_norm
from halfbyte.passes.pipeline import run_passes
from halfbyte.passes.program import Program
from halfbyte.passes.scheme import Activations

silu = torch.nn.functional.silu
EPS = 1e-5


class Block(torch.nn.Module):
    """Residual, norm, gate and up, product, down: as decoders spell it."""

    def __init__(
        self, product: Callable[..., torch.Tensor], inner: int = 128, plus_one: bool = False
    ) -> None:
        super().__init__()
        self.gate = GroupedLinear(random_weight(1, inner, 64, 32, "minimum"))
        self.up = GroupedLinear(random_weight(2, inner, 64, 32, "minimum"))
        self.down = GroupedLinear(random_weight(3, 64, inner, 32, "symmetric", bias=True))
        self.norm = torch.nn.Parameter(torch.rand(64) + 0.5)
        self.product, self.plus_one = product, plus_one

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        even = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        if self.plus_one:
            return (even * (1.0 + self.norm.float())).type_as(x)
        return self.norm * even.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.normed(x)
        return x + self.down(self.product(self.gate(y), self.up(y)))


class Phi(Block):
    """One linear for gate and up, cut in halves; torch's own norm."""

    def __init__(self) -> None:
        super().__init__(torch.mul)
        del self.gate, self.up
        self.both = GroupedLinear(random_weight(4, 256, 64, 32, "minimum"))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (64,), self.norm, EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(self.normed(x)).chunk(2, -1)
        return torch.nn.functional.dropout(self.down(up * silu(gate)), 0.1, training=False) + x


def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


def fused(module: torch.nn.Module, x: Array) -> Program:
    program = Program({"forward": export(module, x)})
    steps = [FindDequantizedLinears(Activations.INT8), MergeLinears(), FuseLinears()]
    run_passes(program, steps)
    return program


def targets(program: Program) -> list[str]:
    nodes = program.entries["forward"].graph.nodes
    return [str(node.target) for node in nodes if node.op == "call_function"]


X = random_activations(5, 6, 64)


@pytest.mark.parametrize(
    ("module", "kind", "after"),
    [
        (Block(swiglu), "silu", "SwiGLU after"),
        (Block(gelu, plus_one=True), "gelu_tanh", "GeGLU after"),
        (Phi(), "silu", "SwiGLU after"),
    ],
    ids=["llama", "gemma", "phi"],
)
def test_a_block_is_two_operators_with_the_bits_of_the_references(
    module: Block, kind: str, after: str
) -> None:
    before = module(tensor(X)).detach()
    program = fused(module, X)
    assert [name for name in targets(program) if "sym" not in name] == ["halfbyte.fused_linear.default"] * 2
    upper = "both" if isinstance(module, Phi) else "gate+up"
    assert program.report.fused == {upper: f"RMSNorm before, {after}", "down": "residual added after"}
    weights = [random_weight(n, 128, 64, 32, "minimum") for n in (1, 2)]
    stacked = random_weight(4, 256, 64, 32, "minimum")
    if not isinstance(module, Phi):
        stacked = type(stacked)(
            np.concatenate([w.codes for w in weights]),
            np.concatenate([w.scale for w in weights]),
            32,
            minimum=np.concatenate([w.minimum for w in weights if w.minimum is not None]),
        )
    norm = array(module.norm)
    h = fused_linear(X, stacked, 1, Around(norm, EPS, module.plus_one, kind), None)
    down = random_weight(3, 64, 128, 32, "symmetric", bias=True)
    got = run(program, X)
    assert same_bits(got, fused_linear(h, down, 1, Around(residual=True), X))
    assert np.abs(got - array(before)).max() < 0.1 * np.abs(array(before)).max()  # rounds activations to int8


def test_what_does_not_fit_stays_apart() -> None:
    class Used(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.normed(x)
            return super().forward(x) + y.sum()

    odd = fused(Block(swiglu, inner=96), X)  # 96 outputs of gate are no whole blocks of 64
    assert odd.report.fused == {
        "gate+up": "RMSNorm before, SwiGLU by IREE: 96 outputs of gate are no whole blocks of 64",
        "down": "residual added after",
    }
    assert "aten.silu.default" in targets(odd)
    exact = fused(Block(lambda gate, up: torch.nn.functional.gelu(gate) * up), X)
    assert exact.report.fused == {"gate+up": "RMSNorm before", "down": "residual added after"}
    swapped = fused(Block(lambda gate, up: gate * silu(up)), X)
    assert swapped.report.fused == {"gate+up": "RMSNorm before", "down": "residual added after"}
    read = fused(Block(lambda gate, up: silu(gate) * up + gate), X)
    assert read.report.fused == {"gate+up": "RMSNorm before", "down": "residual added after"}
    scaled = fused(Block(lambda gate, up: silu(gate) * up * 2), X)
    assert scaled.report.fused["gate+up"] == "RMSNorm before, SwiGLU after"


def test_a_norm_that_others_read_stays() -> None:
    class Routed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.normed(x)
            return self.down(swiglu(self.gate(y), self.up(y))) * y.mean(-1, keepdim=True)

    program = fused(Routed(swiglu), X)
    assert program.report.fused == {"gate+up": "SwiGLU after"}
    assert "aten.rsqrt.default" in targets(program)
    assert len(linears(program)) == 1


def test_the_norm_of_the_row_that_a_head_reads_is_that_of_all_rows() -> None:
    class Head(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(self.normed(x[None])[:, -1])

    module = Head(swiglu)
    program = fused(module, X)
    assert program.report.fused == {"gate": "RMSNorm before"}
    assert "aten.rsqrt.default" not in targets(program)
    weight, around = random_weight(1, 128, 64, 32, "minimum"), Around(array(module.norm), EPS)
    assert same_bits(run(program, X), fused_linear(X[-1:], weight, 1, around, None))


def test_sixteen_bits_stay_apart() -> None:
    program = fused(Phi().to(torch.float16), X.astype(np.float16))
    assert program.report.fused == {}


def test_the_norm_is_that_of_torch_but_for_roundings() -> None:
    for inputs in (1, 3, 35, 64, 100, 576, 2056):
        x = random_activations(inputs, 7, inputs)
        weight = torch.rand(inputs) + 0.5
        for plus_one in (False, True):
            got = rms_norm(tensor(x), weight, EPS, plus_one)
            wide, factor = torch.from_numpy(x).double(), weight.double() + plus_one
            want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * factor
            assert (got - want).abs().max() <= 4e-7 * want.abs().max()


def test_equals_the_twin_on_rows_of_every_kind() -> None:
    weights = (random_weight(1, 128, 96, 32), random_weight(2, 128, 96, 32, "symmetric", levels="e2m1"))
    norm, x = random_activations(1, 1, 96)[0], telling_rows(96)
    residual = random_activations(3, len(x), 128)
    for weight, (activations, digits) in itertools.product(weights, (("int8", 1), ("none", 3))):
        *given, levels = linear_arguments(x, weight, activations, digits)
        for around in (
            Around(norm, 1e-6, True, "silu"),
            Around(norm, 0.0, glu="gelu_tanh"),
            Around(norm, residual=True),
        ):
            beside = residual if around.residual else None
            got = torch.ops.halfbyte.fused_linear(
                *given, tensor(norm), around.eps, around.plus_one, around.glu, tensor(beside), levels
            )
            assert same_bits(array(got), fused_linear(x, weight, digits, around, beside))
