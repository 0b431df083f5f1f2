"""How a linear layer is quantized: the closed vocabulary that readers, passes, lowerings and reports share."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from halfbyte.passes.levels import Levels


class Zero(enum.Enum):
    """Where the value zero sits among the codes."""

    SYMMETRIC = "symmetric"  # zero point 8 everywhere, nothing is stored
    INTEGER = "integer"  # a zero point 0..15 per group
    MINIMUM = "minimum"  # W = u * scale + minimum: a zero point that need not be an integer, carried exactly


class Activations(enum.Enum):
    """What a linear does to its input at run time."""

    NONE = "none"  # W4A16: the input keeps its own precision
    INT8 = "int8"  # W4A8: int8 per token, scale absmax / 127
    FP8 = "fp8"  # W4AFP8: e4m3 per token, scale absmax / 448
    # W4A8 as PyTorch's own tools round, see ``passes/ops/int8_roundings.py``:
    INT8_AFFINE = "int8_affine"  # per token with a zero point: torchao's 8da4w
    INT8_AFFINE_F32 = "int8_affine_f32"  # the same in torchao's Int8DynActInt4WeightLinear
    INT8_AFFINE_F64 = "int8_affine_f64"  # per token with a zero point: quantized_decomposed's
    INT8_SYMMETRIC = "int8_symmetric"  # per token, scale absmax / 127.5
    INT8_FIXED = "int8_fixed"  # one scale and zero point, known before, for all tokens

    @property
    def is_int8(self) -> bool:
        """Whether products are of int8 codes, however they are rounded."""
        return self.value.startswith(Activations.INT8.value)

    @property
    def family(self) -> Activations:
        """``INT8`` for all of its roundings, any other kind itself."""
        return Activations.INT8 if self.is_int8 else self

    @property
    def has_zeros(self) -> bool:
        """Whether codes have a zero point."""
        return self.is_int8 and self not in (Activations.INT8, Activations.INT8_SYMMETRIC)


@dataclass(frozen=True)
class WeightScheme:
    """The quantization of one weight W[N, K].

    Attributes:
        group_size: inputs that share a scale; the last group of a row may be shorter. K for channelwise.
        channelwise: one group per row.
        zero: how zero is represented.
        scale_dtype: ``f16``, ``bf16`` or ``f32``, as stored in the checkpoint.
        act_order: the checkpoint's groups were not contiguous in K (GPTQ ``desc_act``).
        bits: 4 or 8. Other widths are read as float and named in the report.
        levels: what codes stand for.
    """

    group_size: int
    channelwise: bool
    zero: Zero
    scale_dtype: str
    act_order: bool = False
    bits: int = 4
    levels: Levels = Levels.INTEGERS

    def __str__(self) -> str:
        group = "channelwise" if self.channelwise else f"group {self.group_size}"
        order = ", act-order" if self.act_order else ""
        kind = self.levels.kind(self.bits)
        return f"{kind} {self.zero.value}, {group}, {self.scale_dtype} scales{order}"

    @property
    def width(self) -> str:
        """As in the field's names of modes: 4 or 8."""
        return str(self.bits)

    @property
    def computed(self) -> tuple[Activations, ...]:
        """What ``halfbyte::linear`` can do to the input of such a layer, int8 by any of its roundings."""
        if self.levels.exact_with_e4m3(self.bits):
            return (Activations.NONE, Activations.INT8, Activations.FP8)
        return (Activations.NONE, Activations.INT8)


@dataclass(frozen=True)
class Fp8Scheme:
    """The quantization of an e4m3 weight W[N, K]: a scale per block of outputs and inputs.

    Attributes:
        block_outputs: outputs that share a scale; 1 for a scale per output, N for one scale.
        block_inputs: inputs that share a scale, and of fp8 activations share one; K for scales that span a row.
        scale_dtype: ``f16``, ``bf16`` or ``f32``, as stored in the checkpoint.
    """

    block_outputs: int
    block_inputs: int
    scale_dtype: str

    def __str__(self) -> str:
        return f"e4m3, blocks of {self.block_outputs}x{self.block_inputs}, {self.scale_dtype} scales"

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.block_inputs

    @property
    def width(self) -> str:
        """As in the field's names of modes."""
        return "FP8"

    @property
    def computed(self) -> tuple[Activations, ...]:
        """What ``halfbyte::fp8_block_linear`` can do to the input of such a layer."""
        return (Activations.NONE, Activations.FP8)


Scheme = WeightScheme | Fp8Scheme


def mode_name(scheme: Scheme, activations: Activations) -> str:
    """The field's name of a combination: W4A8, W8A8, W4AFP8, W4A16, W8A16, WFP8AFP8, WFP8A16."""
    kinds = {Activations.FP8: "FP8", Activations.NONE: "16"}
    return f"W{scheme.width}A{kinds.get(activations, '8')}"
