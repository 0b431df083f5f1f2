"""Modules for several targets in one, by iree-run-module: the device decides which code runs."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from iree.compiler import ir
from vulkan_device import no_vulkan

from halfbyte.errors import CompilerError
from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.joined_targets import END_FLAG, START_FLAG, Part, join
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.target import Target
from halfbyte.lowering.targets.vulkan import VulkanTarget

SIZE = 4096
TABLE = np.arange(SIZE, dtype=np.float32)


def source(scale: float, function: str = "main") -> str:
    """x * scale + 0, 1, 2, ..., the last as a blob that stands behind the module."""
    kind = f"tensor<{SIZE}xf32>"
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(f"""
            func.func @{function}(%x: {kind}) -> {kind} {{
              %table = arith.constant dense<0.0> : {kind}
              %scale = arith.constant dense<{scale:e}> : {kind}
              %scaled = arith.mulf %x, %scale : {kind}
              %y = arith.addf %scaled, %table : {kind}
              return %y : {kind}
            }}""")
        shaped = ir.RankedTensorType.get([SIZE], ir.F32Type.get())
        blob = ir.DenseResourceElementsAttr.get_from_buffer(TABLE, "table", shaped)
        module.body.operations[0].regions[0].blocks[0].operations[0].attributes["value"] = blob
        return str(module)


def part(target: Target, text: str) -> Part:
    made, _ = compile_module(text, [*target.flags, END_FLAG])
    return Part(target.name, target.device_id, made.decode())


def run(parts: Sequence[Part], folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    content, _ = compile_module(join(parts), [START_FLAG])
    (folder / "fat.vmfb").write_bytes(content)
    tool = Path(sysconfig.get_path("scripts")) / "iree-run-module"
    command = [tool, f"--device={device}", f"--module={folder / 'fat.vmfb'}", "--function=main"]
    command += [f"--input={SIZE}xf32=2", f"--output=@{folder / 'y.npy'}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("device", "scale"), [("local-sync", 3), ("local-task", 3), ("vulkan", 5)])
def test_the_device_decides(device: str, scale: int, tmp_path: Path) -> None:
    """Every target has its own constants, in which one sees whose code ran."""
    if device == "vulkan" and no_vulkan():
        pytest.skip(no_vulkan())
    targets = {3: CpuTarget.named(), 5: VulkanTarget.named(), 7: CudaTarget.named()}
    done = run([part(target, source(n)) for n, target in targets.items()], tmp_path, device)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), 2 * scale + TABLE)


def test_other_devices_run_nothing(tmp_path: Path) -> None:
    parts = [part(target, source(1)) for target in (VulkanTarget.named(), CudaTarget.named())]
    done = run(parts, tmp_path, "local-sync")
    assert done.returncode != 0
    assert "the program is for devices of other kinds: vulkan, cuda" in done.stderr


def test_other_functions_are_refused() -> None:
    parts = [part(CpuTarget.named(), source(1)), part(CudaTarget.named(), source(1, "other"))]
    with pytest.raises(CompilerError, match=r"have other functions(.|\n)*main(.|\n)*other"):
        join(parts)
