"""What GPUs cannot compute is refused before anything is compiled, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.errors import UnsupportedLayerError
from halfbyte.lowering.target_limits import check_experts
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.targets.cuda import CudaTarget
from halfbyte.lowering.targets.vulkan import VulkanTarget


class _Tripled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3.0 + 1.0


def test_vulkan_programs_take_no_f64(tmp_path: Path) -> None:
    """Unrefused, they would read its bytes as twice as many f32."""
    wide = torch.export.export(_Tripled(), (torch.zeros(4, dtype=torch.float64),))
    options = halfbyte.CompileOptions(target="cpu,vulkan")
    with pytest.raises(
        UnsupportedLayerError, match=r"vulkan compute no f64(.|\n)*found: .*f64(.|\n)*cast them"
    ):
        halfbyte.compile(wide, tmp_path / "out", options)
    assert not list(tmp_path.iterdir())
    narrow = torch.export.export(_Tripled(), (torch.zeros(4),))  # whose scalars are f64 to torch
    assert halfbyte.compile(narrow, tmp_path / "out", options).path.is_dir()


@pytest.mark.parametrize("target", [VulkanTarget.named(), CudaTarget.named()])
def test_more_experts_than_can_be_sorted_by_are_refused(target: VulkanTarget | CudaTarget) -> None:
    check_experts(target, "layer", 1024)
    with pytest.raises(UnsupportedLayerError, match=r"layer: too many(.|\n)*1025 experts"):
        check_experts(target, "layer", 1025)
    check_experts(CpuTarget.named("x86-64"), "layer", 1025)
