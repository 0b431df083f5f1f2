"""Graphs that torchao and PyTorch 2 export quantization made, compiled and run on a CPU and on Vulkan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from numpy_twin import Array
from random_layers import random_activations
from torch_bridge import array, tensor
from vulkan_device import far_rows, no_vulkan

import halfbyte

torchao = pytest.importorskip("torchao.quantization")
Q: Any = torch.ops.quantized_decomposed
INPUTS, OUTPUTS = 96, 40
CONFIGS = {
    "groups": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32)),
    "tokens": lambda: torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=torchao.PerGroup(32)
    ),
    "bytes": lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
    "e4m3": lambda: torchao.Float8WeightOnlyConfig(),
}
MODES = {"groups": "W4A16", "tokens": "W4A8", "bytes": "W8A8", "e4m3": "WFP8A16"}


class _Rounded(torch.nn.Module):
    """A linear of 8 bits whose input the graph rounds, all but ``fixed`` in ways that no kernel has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        values = np.random.default_rng(5).integers(-128, 128, (OUTPUTS, INPUTS)).astype(np.int8)
        self.register_buffer("w", tensor(values))
        self.register_buffer("s", torch.rand(OUTPUTS) * 0.01)
        self.register_buffer("z", torch.zeros(OUTPUTS, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "fixed":
            parts: tuple[Any, ...] = (0.03, 7, -128, 127, torch.int8)
            codes = Q.quantize_per_tensor(x, *parts)
        elif self.how == "tensor":
            parts = (*Q.choose_qparams.tensor(x, 0, 255, 1e-6, torch.uint8), 0, 255, torch.uint8)
            codes = Q.quantize_per_tensor(x, *parts)
        elif self.how == "tensor, symmetric":
            parts = (
                *Q.choose_qparams_symmetric.tensor(x, -128, 127, 1e-6, torch.int8),
                -128,
                127,
                torch.int8,
            )
            codes = Q.quantize_per_tensor(x, *parts)
        else:  # 4 bits per token
            chosen = {"token": Q.choose_qparams_per_token, "zeros": Q.choose_qparams_per_token_asymmetric}
            scale, zero = chosen[self.how](x, torch.int8)
            parts = (scale, zero, -8, 7, torch.int8)
            rounded = Q.dequantize_per_token(Q.quantize_per_token(x, *parts), *parts, torch.float32)
            return self.product(rounded)
        return self.product(Q.dequantize_per_tensor(codes, *parts))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        weight = Q.dequantize_per_channel(self.w, self.s, self.z, 0, -128, 127, torch.int8)
        return torch.nn.functional.linear(x, weight)


class _InGroups(torch.nn.Module):
    """torchao's operators, rounding each 32 inputs of a token by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization import quant_primitives as torchao_primitives

        block, mapping = (1, 32), torchao.MappingType.ASYMMETRIC
        scale, zero = torchao_primitives.choose_qparams_affine(x, mapping, block, torch.int8)
        codes = torchao_primitives.quantize_affine(x, block, scale, zero, torch.int8)
        return self.linear(torchao_primitives.dequantize_affine(codes, block, scale, zero, torch.int8))


ROUNDED = ("fixed", "tensor", "tensor, symmetric", "token", "zeros")


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.made = torch.nn.ModuleDict({name: torch.nn.Linear(INPUTS, OUTPUTS) for name in CONFIGS})
        self.rounded = torch.nn.ModuleList(_Rounded(how) for how in ROUNDED)
        self.in_groups = _InGroups()
        for name, config in CONFIGS.items():
            torchao.quantize_(self.made[name], config())
        torchao.quantize_(self.in_groups, CONFIGS["groups"]())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = tuple(layer(x) for layer in self.made.values())
        return (*made, *(layer(x) for layer in self.rounded), self.in_groups(x))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return _Model().eval()


@pytest.fixture(scope="module")
def bundle(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> halfbyte.Compiled:
    program = halfbyte.rewrite(
        model, (torch.zeros(5, INPUTS),), dynamic_shapes=({0: torch.export.Dim("T", max=4096)},)
    )
    target = "cpu" if no_vulkan() else "cpu,vulkan"
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    return halfbyte.compile(program, folder, halfbyte.CompileOptions(target=target))


@pytest.fixture(scope="module")
def wanted(model: torch.nn.Module) -> tuple[Array, list[Array]]:
    """An input of 21 tokens, and what the operators' references make of it."""
    program = halfbyte.rewrite(
        model, (torch.zeros(5, INPUTS),), dynamic_shapes=({0: torch.export.Dim("T", max=4096)},)
    )
    x = random_activations(7, 21, INPUTS)
    x[3] = 0
    return x, [array(y) for y in program.entries["forward"].module()(tensor(x))]


def test_the_report(bundle: halfbyte.Compiled) -> None:
    rows = {row["name"]: row for row in bundle.report["layers"]}
    assert {name.removeprefix("made."): row["mode"] for name, row in rows.items() if "made" in name} == MODES
    stays = [row for row in rows.values() if "stays before it" in row["reason"]]
    assert len(stays) == len(ROUNDED) and {row["mode"] for row in stays} == {"W8A16", "W4A16"}
    asked = {name: rows[name]["activations"] for name in ("made.tokens", "made.bytes", "rounded.0")}
    assert list(asked.values()) == ["int8_affine", "int8_symmetric", "int8_fixed"]
    assert rows["in_groups.linear"]["reason"].count("int8 per group of 32, with zero points") == 1
    assert bundle.report["warnings"] == bundle.report["refusals"] == []


def test_results_on_a_cpu(bundle: halfbyte.Compiled, wanted: tuple[Array, list[Array]]) -> None:
    x, want = wanted
    got = halfbyte.load(bundle.path).call("forward", x)
    for name, one, other in zip(CONFIGS, got, want, strict=False):
        if name == "e4m3":
            assert far_rows(one, other, 2e-6) == []
        elif name == "bytes":  # the bias is an operation of its own, which IREE may fuse
            np.testing.assert_allclose(one, other, rtol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(got[len(CONFIGS)], want[len(CONFIGS)])  # the fixed scale
    for one, other in zip(got[len(CONFIGS) :], want[len(CONFIGS) :], strict=True):
        assert far_rows(one, other, 1e-6) == []


def test_results_on_vulkan(bundle: halfbyte.Compiled, wanted: tuple[Array, list[Array]]) -> None:
    if no_vulkan():
        pytest.skip(no_vulkan())
    x, want = wanted
    got = halfbyte.load(bundle.path, device="vulkan").call("forward", x)
    # Of a row of zeros the rounding of sums is left, which is the zero point times those of the weights.
    np.testing.assert_allclose(got[len(CONFIGS)][3], want[len(CONFIGS)][3], atol=1e-6)
    got[len(CONFIGS)][3] = want[len(CONFIGS)][3]
    for one, other in zip(got, want, strict=True):
        assert far_rows(one, other, 4e-6) == []


def test_any_number_of_tokens(bundle: halfbyte.Compiled, wanted: tuple[Array, list[Array]]) -> None:
    x, want = wanted
    loaded = halfbyte.load(bundle.path)
    per_tensor = {len(CONFIGS) + ROUNDED.index(how) for how in ("tensor", "tensor, symmetric")}
    for rows in (0, 1, 2, 17):
        for index, (one, other) in enumerate(zip(loaded.call("forward", x[:rows]), want, strict=True)):
            assert one.shape == (rows, OUTPUTS)
            if index not in per_tensor:  # whose scales depend on all tokens
                assert far_rows(one, other[:rows], 2e-6) == []
