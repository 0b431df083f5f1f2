"""How a graph rounds the input of a linear, in the operators of torchao and of PyTorch 2 export quantization.

Semantics: torchao's ``quant_primitives`` (``choose_qparams_affine``, ``quantize_affine``, ``dequantize_affine``) and
``torch.ao.quantization.fx._decomposed``. They are told by name: torch knows them only where they were imported.
What the kernels can round to the very same codes (`int8_roundings`) is told from the rest.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from halfbyte.passes.graph_patterns import CASTS, arguments, calls, itself, operator_name, strip
from halfbyte.passes.ops.int8_roundings import ROUNDINGS, FixedRounding
from halfbyte.passes.scheme import Activations
from halfbyte.passes.state_eval import StateEval

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
_ASYMMETRIC = [name for name, chosen in _CHOOSE.items() if chosen == ("token", True)]
_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


@dataclass(frozen=True)
class InputRounding:
    """What a graph makes of the input of a linear before the product.

    Attributes:
        x: what is rounded, in its own precision.
        passed: reshapes and casts between the rounding and the product, the last first.
        activations: what the kernels do in its place, or None where they do nothing alike.
        how: the rounding in words.
        same: the kernels do just that.
        symmetric: zero points are 0.
        fixed: the scale and all else of ``int8_fixed``, as `int8_rounded` takes it, or None.
    """

    x: Node
    passed: tuple[Node, ...]
    activations: Activations | None
    how: str
    same: bool
    symmetric: bool
    fixed: torch.Tensor | None = None


def input_rounding(node: Any, evaluate: StateEval) -> InputRounding | None:
    """The rounding of a float operand: ``dequantize(quantize(x, s, z), s, z)``; None where there is none."""
    root, passed = strip(node)
    if operator_name(root) not in _DEQUANTIZE:
        return None
    given = arguments(root)
    rounding = quantization(given["input"], evaluate)
    if rounding is None or _parameters(given) != _parameters(arguments(strip(given["input"])[0])):
        return None
    return replace(rounding, passed=(*passed, *rounding.passed))


def quantization(node: Any, evaluate: StateEval) -> InputRounding | None:
    """The same of an operand in integers: ``quantize(x, s, z)``."""
    root, passed = strip(node)
    if operator_name(root) not in QUANTIZE:
        return None
    given = arguments(root)
    if not isinstance(given["input"], Node):
        return None
    x = itself(given["input"])
    low, high = _range(given, given.get("dtype") or given.get("output_dtype"))
    bits = f"{'int' if low < 0 else 'uint'}{(high - low).bit_length()}"
    scale, zero = _parameters(given)
    chosen = _chosen(x, scale, zero)
    if chosen is None:
        how, symmetric = f"{bits} with a fixed scale", zero in (0, None)
        fixed = _fixed(root, x, evaluate)
        kind = None if fixed is None else Activations.INT8_FIXED
        return InputRounding(x, tuple(passed), kind, how, fixed is not None, symmetric, fixed)
    how = f"{bits} per {chosen.sharing}" + (
        ", with zero points"
        if chosen.zeros
        else f", scale absmax / {chosen.divisor}"
        if chosen.divisor
        else ""
    )
    symmetric = not chosen.zeros and low < 0
    exact = _exact(root, x, scale, chosen.node)
    if exact is not None:
        return InputRounding(x, tuple(passed), exact, how, True, symmetric)
    int8 = chosen.sharing == "token" and bits in ("int8", "uint8") and (chosen.zeros or low < 0)
    same = int8 and not chosen.zeros and chosen.divisor == "127"
    return InputRounding(x, tuple(passed), Activations.INT8 if int8 else None, how, same, symmetric)


def _exact(quantize: Node, x: Node, scale: Node, choice: Node) -> Activations | None:
    """Which of the kernels' roundings gives the very codes of these operators; None where none does."""
    if operator_name(quantize) == f"{_DECOMPOSED}.quantize_per_token":
        given = arguments(quantize)
        eight = _range(given, given["dtype"]) == (-128, 127) and not _recast(given["scales"])
        return Activations.INT8_AFFINE_F64 if eight and operator_name(choice) in _ASYMMETRIC else None
    if operator_name(choice) != _CHOOSE_AFFINE or operator_name(quantize) != "torchao.quantize_affine":
        return None
    chosen, given, dtype = arguments(choice), arguments(quantize), x.meta["val"].dtype
    ranges = _range(chosen, chosen["target_dtype"]), _range(given, given["output_dtype"])
    if ranges != ((-128, 127), (-128, 127)) or not _per_token(chosen, x) or not _per_token(given, x):
        return None
    if _recast(given["scale"]):
        return None
    kept = chosen["scale_dtype"] or dtype
    for kind, rounding in ROUNDINGS.items():
        if rounding.double:
            continue
        least = chosen["eps"] if chosen["eps"] is not None else torch.finfo(dtype).smallest_normal
        mapping = "ASYMMETRIC" if rounding.zeros else "SYMMETRIC"
        inner = dtype if rounding.narrow else torch.float32
        if (chosen["mapping_type"], least, kept) == (mapping, rounding.least_scale(dtype), inner):
            return kind
    return None


def _per_token(given: dict[str, Any], x: Node) -> bool:
    *others, last = given["block_size"]
    return others == [1] * len(others) and bool(last == x.meta["val"].shape[-1])


def _recast(node: Any) -> bool:
    """Whether the way to what computes a value leads through another dtype."""
    return any(passed.target in CASTS and _changes(passed) for passed in strip(node)[1])


def _changes(cast: Node) -> bool:
    before: Any = cast.args[0]
    return bool(before.meta["val"].dtype != cast.meta["val"].dtype)


def _fixed(quantize: Node, x: Node, evaluate: StateEval) -> torch.Tensor | None:
    """What `int8_rounded` takes for a scale and zero point that the graph knows before; None for what it cannot do."""
    given = arguments(quantize)
    kind = given.get("dtype") or given.get("output_dtype")
    scale, zero = (_number(part, evaluate) for part in _given(given))
    if kind not in _RANGES or scale is None or zero is None:
        return None
    narrow = x.meta["val"].dtype != torch.float32
    if narrow and operator_name(quantize) == "torchao.quantize_affine" and _float_type(given, evaluate):
        return None  # computed in the dtype of x
    least, most = _range(given, kind)
    shift = 0 if kind is torch.int8 else 128
    if zero != int(zero):
        return None
    found = FixedRounding(scale, int(zero) - shift, least - shift, most - shift)
    return found.tensor() if found.computed else None


def _float_type(given: dict[str, Any], evaluate: StateEval) -> bool:
    """Whether a scale is a tensor of another dtype than float32."""
    scale = given["scale"]
    return isinstance(scale, Node) and evaluate(scale).dtype is not torch.float32


def _number(part: Any, evaluate: StateEval) -> float | None:
    """A scalar of the graph or its state."""
    value = evaluate(part) if isinstance(part, Node) else 0 if part is None else part
    if value is None or (isinstance(value, torch.Tensor) and value.numel() != 1):
        return None
    return float(value)


def _given(given: dict[str, Any]) -> tuple[Any, Any]:
    scale = given["scale"] if "scale" in given else given["scales"]
    return scale, given["zero_point"] if "zero_point" in given else given["zero_points"]


def _parameters(given: dict[str, Any]) -> tuple[Any, Any]:
    scale, zero = _given(given)
    return strip(scale)[0], strip(zero)[0]


def _range(given: dict[str, Any], kind: Any) -> tuple[int, int]:
    low, high = _RANGES.get(kind, (0, 0))
    asked = given.get("quant_min"), given.get("quant_max")
    if any(isinstance(part, Node) for part in asked):
        return 0, 0  # no range that is known here
    return (low if asked[0] is None else int(asked[0])), (high if asked[1] is None else int(asked[1]))


@dataclass(frozen=True)
class _Chosen:
    """Scales that the graph chooses for what it rounds.

    Attributes:
        node: the operator that does.
        sharing: what shares a scale.
        zeros: whether there are zero points.
        divisor: absmax / scale, in words.
    """

    node: Node
    sharing: str
    zeros: bool
    divisor: str


def _chosen(x: Node, scale: Any, zero: Any) -> _Chosen | None:
    """How the scale of x is chosen; None for one that is not x's own."""
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
        return _Chosen(choice, sharing, zeros, "" if zeros else "127" if sharing == "token" else "127.5")
    low, high = _range(given, given["target_dtype"])
    block = given["block_size"]
    inside = [size for size in block if size != 1]
    sharing = "token" if _per_token(given, x) else "block"
    if sharing == "block" and len(inside) == 1 and block[-1] != 1:
        sharing = f"group of {block[-1]}"
    zeros = given["mapping_type"] == "ASYMMETRIC"
    half = f"{(high - low) / 2:g}" if given["mapping_type"] == "SYMMETRIC" else "of each sign's own range"
    return _Chosen(choice, sharing, zeros, "" if zeros else half)
