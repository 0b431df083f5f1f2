"""Codes that stand for the entries of a table: the operators against numpy twins, and the weight object."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fused_twin import Around, fused_linear
from numpy_twin import E4M3, e2m1, linear, same_bits, same_by_row
from random_layers import extreme_weight, random_activations, random_weight, telling_rows
from rewritten_graphs import export
from torch_bridge import array, layer_source, linear_arguments, operator_linear, quant_tensor, tensor

from halfbyte.passes.fuse_linears import FuseLinears
from halfbyte.passes.levels import Levels
from halfbyte.passes.merge_linears import MergeLinears
from halfbyte.passes.pipeline import run_passes
from halfbyte.passes.program import Program
from halfbyte.passes.quant_linear import QuantLinear
from halfbyte.passes.scheme import Activations
from halfbyte.passes.weight import QuantTensor

TABLES = ("e2m1", "iq4nl")
MODES = (("int8", 3, 1), ("none", 2, 2), ("none", 3, 3), ("fp8", 3, E4M3))


def test_the_tables() -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert Levels.E2M1.table == tuple((2 * e2m1(codes)).astype(int))
    from gguf.quants import IQ4_NL

    assert Levels.IQ4NL.table == IQ4_NL.kvalues
    assert Levels.INTEGERS.table is None


@pytest.mark.parametrize("levels", TABLES)
def test_equals_the_twin(levels: str) -> None:
    for seed, (outputs, inputs, group) in enumerate(((5, 96, 8), (12, 192, 32), (7, 136, 24), (6, 35, 35))):
        weights = [
            random_weight(seed, outputs, inputs, group, "symmetric", "bf16", seed % 2 == 0, levels=levels)
        ]
        weights.append(extreme_weight(seed, 16, inputs, group, levels))
        x = np.concatenate([random_activations(seed, 3, inputs), telling_rows(inputs)])
        for weight in weights:
            for activations, digits, twin_digits in MODES[: 4 if levels == "e2m1" else 3]:
                got = operator_linear(x, weight, activations, digits)
                want = linear(x, weight, twin_digits)
                assert same_bits(got, want), (inputs, activations, digits, same_by_row(got, want))


def test_the_largest_sums_with_e4m3_activations_are_exact() -> None:
    """128 products of 448 and 6: 512 times that, and twice, is no float32, but the sum is rounded once."""
    assert [levels.exact_with_e4m3(4) for levels in Levels] == [True, True, False]
    assert not Levels.INTEGERS.exact_with_e4m3(8)
    weight = replace(
        extreme_weight(1, 16, 128, 128, "e2m1"), bias=None, scale=np.full((16, 1), 0.5, np.float32)
    )
    x = np.full((1, 128), 448, np.float32)
    x[0, 0] = 447  # rounds to 448
    np.testing.assert_array_equal(
        operator_linear(x, weight, "fp8")[0], 128 * 448 * e2m1(weight.codes[:, 0]).astype(np.float32)
    )


@pytest.mark.parametrize("levels", TABLES)
def test_the_weight_object(levels: str) -> None:
    weight = random_weight(3, 9, 72, 24, "symmetric", "f16", levels=levels)
    whole = quant_tensor("a", weight)
    np.testing.assert_array_equal(whole.dequantize().double(), weight.dequantized().astype(np.float32))
    np.testing.assert_array_equal(whole.integers(), weight.whole())
    assert str(whole.scheme) == f"{levels} symmetric, group 24, f16 scales"
    assert (Activations.FP8 in whole.scheme.computed) == (levels == "e2m1")
    np.testing.assert_array_equal(whole.rows(2, 5).dequantize(), whole.dequantize()[2:5])
    assert whole.same_values(replace(whole, name="b"))
    assert not whole.same_values(replace(whole, levels=Levels.INTEGERS))
    order = torch.randperm(72)
    np.testing.assert_array_equal(
        replace(whole, permutation=order).dequantize()[:, order], whole.dequantize()
    )
    for wrong in ({"bits": 8}, {"zero": torch.zeros(9, 3).byte()}, {"minimum": torch.zeros(9, 3).half()}):
        with pytest.raises(ValueError, match=r"a: .* takes codes of 4 bits and no zero points"):
            replace(whole, **wrong)


@pytest.mark.parametrize(
    ("levels", "change", "text"),
    [
        ("e2m3", {}, "levels must be one of integers, e2m1, iq4nl"),
        ("e2m1", {6: 8}, "codes of 4 bits"),
        ("iq4nl", {3: torch.zeros(6, 5, dtype=torch.uint8)}, "no zero points"),
        ("iq4nl", {8: "fp8"}, "fp8 activations are not computed on iq4nl weights"),
        ("integers", {6: 8, 8: "fp8"}, "fp8 activations are not computed on int8 weights"),
    ],
)
def test_what_no_kernel_has_is_refused(levels: str, change: dict[int, object], text: str) -> None:
    weight = random_weight(1, 6, 40, 8, "symmetric")
    arguments = [*linear_arguments(random_activations(1, 3, 40), weight, "int8")]
    arguments[-1] = levels
    for at, value in change.items():
        arguments[at] = value
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match=text),
    ):
        torch.ops.halfbyte.linear(*arguments)


class _Layers(torch.nn.Module):
    """Linears of three kinds on a norm's result, to the last of which a residual is added."""

    def __init__(self, weights: dict[str, QuantTensor]) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64, eps=1e-5)
        torch.nn.init.normal_(self.norm.weight, 1, 0.1)
        for name, weight in weights.items():
            shape, known = weight.shape, {"activations": Activations.INT8, "digits": 3}
            layer = QuantLinear(name, weight.scheme, shape, bias=False, **known)
            self.add_module(name, layer.fill(weight))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(x)
        return self.a(y), self.b(y), self.c(y), self.d(x) + x


def test_only_equal_kinds_merge_and_fusing_keeps_them() -> None:
    made = {
        name: random_weight(seed, 64 if name == "d" else 24, 64, 16, "symmetric", levels=levels)
        for seed, (name, levels) in enumerate(
            (*zip("abc", ("e2m1", "integers", "e2m1"), strict=True), ("d", "iq4nl"))
        )
    }
    module, x = (
        _Layers({name: quant_tensor(name, w) for name, w in made.items()}),
        random_activations(1, 5, 64),
    )
    program = Program({"forward": export(module, x)})
    program.layers = {name: layer_source(name, weight) for name, weight in made.items()}
    run_passes(program, [MergeLinears(), FuseLinears()])
    assert program.report.merged == {"a+c": ["a", "c"]}
    assert program.report.fused["d"] == "residual added after"
    joined = program.layers["a+c"].weight()
    assert joined.scheme == quant_tensor("a", made["a"]).scheme
    got = program.entries["forward"].module()(tensor(x))
    normed = Around(array(module.norm.weight))
    for name, y in zip("abc", got, strict=False):
        want = fused_linear(x, made[name], 1, normed, None)
        near = np.abs(array(y) - want) <= 2e-2 * np.abs(want).max()  # a norm's roundings may move a code
        assert near.all() and (np.abs(array(y) - want) <= 1e-6 * np.abs(want).max()).mean() > 0.9
    assert same_bits(array(got[3]), fused_linear(x, made["d"], 1, Around(residual=True), x))
