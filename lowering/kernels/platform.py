"""What all kernels of a program share: the kind of device they are written for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """A kind of device, as far as the text of every kernel depends on it.

    Attributes:
        device: ``cpu``, ``vulkan``, ``vulkan_nodot`` (without the integer dot product), ``cuda``, or
            ``vulkan_mma``: CUDA's kernels on Vulkan, with tensor cores replaced by the definition of their product.
        soft_f16: a CPU without an instruction that casts f16.
    """

    device: str = "cpu"
    soft_f16: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    def template(self, name: str) -> str:
        """Where the kernel of that name is written: GPUs have a folder of their own."""
        return f"gpu/{name}.mlir.j2" if self.is_gpu else f"{name}.mlir.j2"

    @property
    def values(self) -> dict[str, object]:
        """What templates read of it."""
        return {"device": self.device, "soft_f16": self.soft_f16}

    def suffix(self, *dtypes: str) -> str:
        """The end of a kernel's symbol, if its text depends on the platform; ``dtypes`` are those it casts."""
        if self.is_gpu:
            return f"_{self.device}"
        return "_softf16" if self.soft_f16 and "f16" in dtypes else ""


CPU = Platform()
CPU_WITHOUT_F16C = Platform(soft_f16=True)
VULKAN = Platform("vulkan")
VULKAN_WITHOUT_DOT = Platform("vulkan_nodot")
VULKAN_MMA = Platform("vulkan_mma")
CUDA = Platform("cuda")
