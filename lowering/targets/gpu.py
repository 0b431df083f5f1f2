"""What the targets of GPUs have in common."""

from __future__ import annotations

import abc

from halfbyte.lowering.kernels.attention import AttentionOfThreads, AttentionShape
from halfbyte.lowering.kernels.fp8_kernels import FloatUnit
from halfbyte.lowering.kernels.head_linear import HeadLinear
from halfbyte.lowering.targets.target import Target


class GpuTarget(Target):
    """A kind of GPU: the kernels of ``templates/gpu``."""

    @property
    def float_unit(self) -> FloatUnit:
        return FloatUnit.NARROW

    def attention(self, shape: AttentionShape, io: str, cache: str, one_token: bool) -> AttentionOfThreads:
        return AttentionOfThreads(shape, io, io, cache, self.platform)

    def head_linear(
        self, inputs: int, outputs: int, kept: int, io: str, weight: str, one_token: bool
    ) -> HeadLinear:
        return HeadLinear(inputs, outputs, kept, io, weight, one_token, platform=self.platform)

    @property
    def flags(self) -> list[str]:
        """For iree-compile.

        Buffers bound as one at several offsets do not compile in kernels that are written by hand (IREE 3.13).
        """
        return ["--iree-scheduling-optimize-bindings=false", *self._device_flags]

    @property
    @abc.abstractmethod
    def _device_flags(self) -> list[str]:
        """What names the device to iree-compile."""
