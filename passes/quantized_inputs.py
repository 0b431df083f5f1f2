"""How a graph rounds the input of a linear, in the operators of torchao and of PyTorch 2 export quantization.

Semantics: torchao's ``quant_primitives`` (``choose_qparams_affine``, ``quantize_affine``, ``dequantize_affine``) and
``torch.ao.quantization.fx._decomposed``. They are told by name: torch knows them only where they were imported.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from halfbyte.passes.graph_patterns import arguments, calls, itself, operator_name, strip
from halfbyte.passes.scheme import Activations

_DECOMPOSED = "quantized_decomposed"
QUANTIZE = (
    "torchao.quantize_affine",
    f"{_DECOMPOSED}.quantize_per_token",
    f"{_DECOMPOSED}.quantize_per_tensor",
)
_DEQUANTIZE = (
    "torchao.dequantize_affine",
    f"{_DECOMPOSED}.dequantize_per_token",
    f"{_DECOMPOSED}.dequantize_per_tensor",
)
_CHOOSE_AFFINE = "torchao.choose_qparams_affine"
# Per token or tensor, and whether with zero points.
_CHOOSE = {
    f"{_DECOMPOSED}.choose_qparams_per_token": ("token", False),
    f"{_DECOMPOSED}.choose_qparams_per_token_asymmetric": ("token", True),
    f"{_DECOMPOSED}._choose_qparams_per_token_asymmetric_impl": ("token", True),
    f"{_DECOMPOSED}.choose_qparams": ("tensor", True),
    f"{_DECOMPOSED}.choose_qparams_symmetric": ("tensor", False),
}
_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


@dataclass(frozen=True)
class InputRounding:
    """What a graph makes of the input of a linear before the product.

    Attributes:
        x: what is rounded, in its own precision.
        passed: reshapes and casts between the rounding and the product, the last first.
        activations: what the kernels do in its place, or None where they do nothing alike.
        how: the rounding in words.
        same: the kernels do just that (below the least scale that the graph allows they go on rounding).
        symmetric: zero points are 0.
    """

    x: Node
    passed: tuple[Node, ...]
    activations: Activations | None
    how: str
    same: bool
    symmetric: bool


def input_rounding(node: Any) -> InputRounding | None:
    """The rounding of a float operand: ``dequantize(quantize(x, s, z), s, z)``; None where there is none."""
    root, passed = strip(node)
    if operator_name(root) not in _DEQUANTIZE:
        return None
    given = arguments(root)
    rounding = quantization(given["input"])
    if rounding is None or _parameters(given) != _parameters(arguments(given["input"])):
        return None
    return _behind(rounding, passed)


def quantization(node: Any) -> InputRounding | None:
    """The same of an operand in integers: ``quantize(x, s, z)``."""
    root, passed = strip(node)
    if operator_name(root) not in QUANTIZE:
        return None
    given = arguments(root)
    if not isinstance(given["input"], Node):
        return None
    x = itself(given["input"])
    kind = given.get("dtype") or given.get("output_dtype")
    low, high = _range(given, kind)
    bits = f"{'int' if low < 0 else 'uint'}{(high - low).bit_length()}"
    scale, zero = _parameters(given)
    chosen = _chosen(x, scale, zero)
    if chosen is None:
        how, symmetric = f"{bits} with a fixed scale", zero in (0, None)
        return InputRounding(x, tuple(passed), None, how, False, symmetric)
    sharing, zeros, divisor = chosen
    how = f"{bits} per {sharing}" + (
        ", with zero points" if zeros else f", scale absmax / {divisor}" if divisor else ""
    )
    int8 = sharing == "token" and bits in ("int8", "uint8") and (zeros or low < 0)
    same = int8 and not zeros and divisor == "127"
    kernels = Activations.INT8 if int8 else None
    return InputRounding(x, tuple(passed), kernels, how, same, not zeros and low < 0)


def _behind(rounding: InputRounding, passed: list[Node]) -> InputRounding:
    both = (*passed, *rounding.passed)
    return InputRounding(
        rounding.x, both, rounding.activations, rounding.how, rounding.same, rounding.symmetric
    )


def _parameters(given: dict[str, Any]) -> tuple[Any, Any]:
    scale = given["scale"] if "scale" in given else given["scales"]
    zero = given["zero_point"] if "zero_point" in given else given["zero_points"]
    return strip(scale)[0], strip(zero)[0]


def _range(given: dict[str, Any], kind: Any) -> tuple[int, int]:
    low, high = _RANGES.get(kind, (0, 0))
    asked = given.get("quant_min"), given.get("quant_max")
    return (low if asked[0] is None else int(asked[0])), (high if asked[1] is None else int(asked[1]))


def _chosen(x: Node, scale: Any, zero: Any) -> tuple[str, bool, str] | None:
    """What shares a scale, whether there are zero points, and absmax / scale; None for a fixed scale."""
    if not calls(scale, operator.getitem) or not calls(zero, operator.getitem):
        return None
    choice = scale.args[0]
    if zero.args[0] is not choice or (scale.args[1], zero.args[1]) != (0, 1):
        return None
    given = arguments(choice) if operator_name(choice) in (*_CHOOSE, _CHOOSE_AFFINE) else {}
    if not given or itself(given["input"]) is not x:
        return None
    if operator_name(choice) in _CHOOSE:
        sharing, zeros = _CHOOSE[operator_name(choice)]
        return sharing, zeros, "" if zeros else "127" if sharing == "token" else "127.5"
    low, high = _range(given, given["target_dtype"])
    shape, block = x.meta["val"].shape, given["block_size"]
    inside = [size for size in block if size != 1]
    sharing = "token" if [*block[:-1]] == [1] * (len(block) - 1) and block[-1] == shape[-1] else "block"
    if sharing == "block" and len(inside) == 1 and block[-1] != 1:
        sharing = f"group of {block[-1]}"
    zeros = given["mapping_type"] == "ASYMMETRIC"
    half = f"{(high - low) / 2:g}" if given["mapping_type"] == "SYMMETRIC" else "of each sign's own range"
    return sharing, zeros, "" if zeros else half
