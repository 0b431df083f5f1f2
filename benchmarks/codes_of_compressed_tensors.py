"""How many int8 codes of random inputs are others than compressed-tensors', where a checkpoint of its asks for them.

python benchmarks/codes_of_compressed_tensors.py          needs compressed-tensors, which halfbyte does not
"""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

from halfbyte.passes.ops.int8_roundings import FixedRounding, int8_rounded
from halfbyte.passes.scheme import Activations

_ROWS, _INPUTS, _TIMES = 256, 4096, 40


def static(symmetric: bool, dtype: torch.dtype) -> tuple[int, int]:
    """Of a scale drawn between 0.01 and 0.04: codes that differ from the tool's in float32, and in ``dtype``."""
    args = QuantizationArgs(num_bits=8, type="int", symmetric=symmetric, strategy="tensor", dynamic=False)
    in_float32 = in_dtype = 0
    for time in range(_TIMES):
        x, scale = torch.randn(_ROWS, _INPUTS).to(dtype), torch.rand(1) * 0.03 + 0.01
        zero = torch.tensor([0 if symmetric else 2 * time - 39], dtype=torch.int8)
        fixed = FixedRounding(float(scale), int(zero)).tensor()
        codes, _, _ = int8_rounded(x, Activations.INT8_FIXED, fixed)
        in_float32 += int((codes != quantize(x.float(), scale, zero, args)).sum())
        in_dtype += int((codes != quantize(x, scale.to(dtype), zero, args)).sum())
    return in_float32, in_dtype


def per_token() -> int:
    args = QuantizationArgs(num_bits=8, type="int", symmetric=False, strategy="token", dynamic=True)
    found = 0
    for _ in range(_TIMES):
        x = torch.randn(_ROWS, _INPUTS)
        scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Identity())
        codes, _, _ = int8_rounded(x, Activations.INT8_AFFINE_F32)
        found += int((codes != quantize(x, scale[0], zero[0], args)).sum())
    return found


def main() -> None:
    torch.manual_seed(1)
    print(f"of {_ROWS * _INPUTS * _TIMES} codes differ")
    for symmetric in (True, False):
        kind = "symmetric" if symmetric else "with a zero point"
        for dtype in (torch.float32, torch.bfloat16):
            found = static(symmetric, dtype)
            print(f"static, {kind}, {dtype}: {found[0]} with the tool in float32, {found[1]} in {dtype}")
    print(f"per token with a zero point, float32: {per_token()}")


if __name__ == "__main__":
    main()
