"""Activations by zero points by groups by kind of layer: what the README claims of every target, cell by cell."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from kernel_cases import E4M3
from layer_bundles import Case as Dense
from layer_bundles import call_layer, compile_program
from moe_twin import moe, random_experts
from numpy_twin import Array, linear, same_bits
from ptx_assembler import assembled, assembler
from random_layers import random_activations, random_weight
from test_moe_kernels import Case as Experts
from test_moe_kernels import routed
from vulkan_device import far_rows, no_vulkan

from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.layer_program import ArchivedLayer, layer_program
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.lowering.targets.vulkan import VulkanTarget
from halfbyte.runtime import Bundle

ACTIVATIONS = {"int8": 1, "e4m3": E4M3, "float": 3}
ZEROS = {"symmetric": "symmetric", "asymmetric": "integer"}
GROUPS = {"group 32": 32, "group 128": 128, "channelwise": 0}
LAYERS = ("dense", "experts")
TARGETS = {
    "cpu": "equal to the reference bit for bit",
    "vulkan": "within 1e-6 of it, on lavapipe",
    "cuda": "assembled for sm_80, not run",
}


@dataclass(frozen=True)
class Cell:
    activations: str
    zeros: str
    group: str
    layer: str

    @property
    def name(self) -> str:
        return "_".join((self.activations, self.zeros, self.group.replace(" ", ""), self.layer))

    def made(self) -> Dense | Experts:
        digits, kind, group = ACTIVATIONS[self.activations], ZEROS[self.zeros], GROUPS[self.group]
        if self.layer == "dense":
            return Dense(
                self.name, random_weight(7, 200, 384, group or 384, kind, "f16", True), "f32", digits
            )
        sizes = (group or 256, group or 128)
        return Experts(self.name, random_experts(8, 5, 256, 128, sizes, kind, "f16"), 2, "f32", digits)


GRID = [Cell(*cell) for cell in product(ACTIVATIONS, ZEROS, GROUPS, LAYERS)]


def _bundle(folder: Path, target: Target, device: str) -> Bundle:
    layers = []
    for cell in GRID:
        case = cell.made()
        kernels = (
            case.linear(target.isa, target) if isinstance(case, Dense) else case.kernels(target.isa, target)
        )
        if isinstance(case, Dense):
            outputs, inputs = case.weight.codes.shape
            group = target.pack(case.name, kernels, case.source())
            layers.append((case.name, kernels, group, (((inputs,), case.io),), ((outputs,), case.io)))
        else:
            group = target.pack_experts(case.name, kernels, case.source())
            given = (((case.hidden,), case.io), ((case.slots,), "i64"), ((case.slots,), "f32"))
            layers.append((case.name, kernels, group, given, ((case.hidden,), case.io)))
    return compile_program(folder, layers, target, device)


@pytest.fixture(scope="module", params=["cpu", "vulkan"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if request.param == "vulkan" and no_vulkan():
        pytest.skip(no_vulkan())
    target = CpuTarget.named() if request.param == "cpu" else VulkanTarget.named()
    return _bundle(tmp_path_factory.mktemp("grid") / request.param, target, request.param)


@pytest.mark.parametrize("cell", GRID, ids=lambda cell: cell.name)
def test_cell_runs_right(bundle: Bundle, cell: Cell) -> None:
    case = cell.made()
    for rows in (1, 9, 33):
        got: Array
        if isinstance(case, Dense):
            x = random_activations(rows, rows, case.weight.codes.shape[1], "f32")
            got, want = call_layer(bundle, cell.name, x), linear(x, case.weight, case.digits)
        else:
            x, ids, weights = routed(case, rows)
            got = call_layer(bundle, cell.name, x, ids, weights)
            want = moe(x, ids, weights, case.experts, case.digits)
        if bundle.device.target == "cpu":
            assert same_bits(got, want)
        else:
            assert not far_rows(got, want)


def test_every_cell_is_assembled(tmp_path: Path) -> None:
    if assembler() is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc")
    target, layers = CudaTarget.named(), []
    for cell in GRID:
        case = cell.made()
        kernels = (
            case.linear(target.isa, target) if isinstance(case, Dense) else case.kernels(target.isa, target)
        )
        layers.append(ArchivedLayer(case.name, kernels))
    flags = [*target.flags, f"--iree-hal-dump-executable-files-to={tmp_path / 'ptx'}"]
    compile_module(layer_program(layers), flags, cache=False)
    found = assembled(tmp_path / "ptx", target.architecture, tmp_path)
    wanted = {kernel.symbol for layer in layers for kernel in layer.linear.kernels}
    assert wanted <= found.keys()
