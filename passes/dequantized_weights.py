"""What the weight of a product was dequantized from: codes, zero points and scales, all of full size.

The packing is not matched: whatever shifts and masks unpack the codes, they depend on state alone, so they are
evaluated. What is matched is the last step, plain operations or an operator of torchao or ``quantized_decomposed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from halfbyte.passes.graph_patterns import RESHAPES, arguments, calls, operator_name, strip
from halfbyte.passes.linear_products import INT4_PACKED, Product
from halfbyte.passes.state_eval import StateEval

_aten: Any = torch.ops.aten
_ADD = (_aten.add.Tensor,)
_SUB = (_aten.sub.Tensor, _aten.sub.Scalar)
_MUL = (_aten.mul.Tensor, _aten.mul.Scalar)


@dataclass(frozen=True)
class Dequantized:
    """[N, K] each: (codes - zero) * scale, or codes * scale + minimum; codes and zero points int64.

    The codes are e4m3 where their dtype is.
    """

    codes: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None

    @property
    def fp8(self) -> bool:
        return self.codes.dtype is torch.float8_e4m3fn


def dequantization(evaluate: StateEval, product: Product) -> Dequantized | None:
    """Takes the weight of a product apart; None where it was not dequantized, or by other operations."""
    if operator_name(product.node) == INT4_PACKED:
        return _int4_packed(evaluate, product.node)
    root, passed = strip(product.weight)
    if not isinstance(root, Node):
        return None
    for parts in _candidates(evaluate, product, root):
        full = [None if part is None else _placed(part, passed, product) for part in parts]
        codes, zero, scale, minimum = full
        assert codes is not None and zero is not None and scale is not None
        if product.factor is not None:
            scale = scale * evaluate(product.factor).reshape(-1, 1)
        if codes.dtype is torch.float8_e4m3fn:
            if not bool(zero.any()) and minimum is None:
                return Dequantized(codes, zero.to(torch.int64), scale)
        elif _whole(codes) and _whole(zero) and bool((codes != codes[:1, :1]).any()):
            return Dequantized(codes.to(torch.int64), zero.to(torch.int64), scale, minimum)
    return None


def _int4_packed(evaluate: StateEval, node: Node) -> Dequantized | None:
    """(codes - 8) * scale + zero; the operator itself unpacks the codes, where it runs: times the unit matrix."""
    _, packed, size, both = node.args
    weight, parameters = evaluate(packed), evaluate(both)  # type: ignore[arg-type]
    if weight is None or parameters is None:
        return None
    inputs = int(node.args[0].meta["val"].shape[-1])  # type: ignore[union-attr]
    plain = torch.zeros_like(parameters)
    plain[..., 0] = 1
    unit = torch.eye(inputs, dtype=parameters.dtype)
    codes = node.target(unit, weight, size, plain).T.to(torch.int64) + 8  # type: ignore[operator]
    scale, zero = (part.T.float().repeat_interleave(size, 1)[:, :inputs] for part in parameters.unbind(-1))
    if not bool(zero.any()):
        return Dequantized(codes, torch.full_like(codes, 8), scale)
    return Dequantized(codes, torch.zeros_like(codes), scale, zero - 8 * scale)


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _candidates(evaluate: StateEval, product: Product, root: Node) -> list[_Parts]:
    """Codes, zero points, scales and minima of one shape, that of the last step."""
    if product.factor is not None:
        scale = evaluate(product.factor)
        return _less_zero(evaluate, root, torch.ones((), dtype=scale.dtype), None, root)
    if operator_name(root) in _NAMED:
        parts = _NAMED[operator_name(root)](evaluate, arguments(root))
        return [] if parts is None else [(*parts, None)]
    minimum: torch.Tensor | None = None
    multiplied: Any = root
    if calls(root, *_ADD) and len(root.args) == 2 and not root.kwargs:
        for side, other in (root.args, root.args[::-1]):
            inner, between = strip(side)
            if calls(inner, *_MUL) and not between:
                multiplied, minimum = inner, _value(evaluate, other)
                break
    if not calls(multiplied, *_MUL):
        return []
    found: list[_Parts] = []
    for side, other in (multiplied.args, multiplied.args[::-1]):
        scale = _value(evaluate, other)
        if scale is not None:
            found += _less_zero(evaluate, side, scale, minimum, root)
    return found


def _less_zero(
    evaluate: StateEval, side: Any, scale: torch.Tensor, minimum: torch.Tensor | None, root: Node
) -> list[_Parts]:
    """With the zero points of ``codes - zero``, if that is what a side is."""
    inner, between = strip(side)
    like = evaluate(root).shape
    codes, zero = _value(evaluate, side), torch.tensor(0)
    before = evaluate(inner) if isinstance(inner, Node) else None
    if calls(inner, *_SUB) and len(inner.args) == 2 and not inner.kwargs:
        shape = before.shape
        operands = [_value(evaluate, part) for part in inner.args]
        if any(part is None for part in operands):
            return []
        codes, zero = (_replay(part.expand(shape).contiguous(), between) for part in operands)
    elif before is not None and before.dtype is torch.float8_e4m3fn:
        codes = _replay(before, between)
    parts = (codes, zero, scale, minimum)
    if codes is None or not all(part is None or _broadcasts(part, like) for part in parts):
        return []
    full = [None if part is None else part.expand(like).contiguous() for part in parts]
    return [tuple(full)]  # type: ignore[list-item]


def _placed(part: torch.Tensor, passed: list[Node], product: Product) -> torch.Tensor:
    """[N, K], as the product has it."""
    value = _replay(part, passed)
    return value.T if product.transposed else value


def _value(evaluate: StateEval, part: Any) -> Any:
    if part is None:
        return None
    return evaluate(part) if isinstance(part, Node) else torch.as_tensor(part)


def _broadcasts(part: torch.Tensor, like: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(part.shape, like) == like
    except RuntimeError:
        return False


def _replay(value: torch.Tensor, passed: list[Node]) -> torch.Tensor:
    """Applies the reshapes, but not the casts."""
    for node in reversed(passed):
        if node.target in RESHAPES:
            value = node.target(value, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return value


def _whole(values: torch.Tensor) -> bool:
    return not values.is_floating_point() or bool((values == values.round()).all())


_Named = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


def _affine(evaluate: StateEval, given: dict[str, Any]) -> _Named:
    """``torchao.dequantize_affine``: blocks of any shape share a scale."""
    codes, block = evaluate(given["input"]), given["block_size"]
    counts = [size // inside for size, inside in zip(codes.shape, block, strict=True)]

    def spread(part: torch.Tensor) -> torch.Tensor:
        whole = part.reshape(counts)
        for axis, inside in enumerate(block):
            whole = whole.repeat_interleave(inside, axis)
        return whole

    zero = _value(evaluate, given["zero_point"])
    scale = spread(evaluate(given["scale"]))
    return codes, torch.zeros_like(codes) if zero is None or not zero.numel() else spread(zero), scale


def _per_group(evaluate: StateEval, given: dict[str, Any]) -> _Named:
    codes, zero = evaluate(given["input"]), _value(evaluate, given["zero_points"])
    size = given["group_size"]
    scale = evaluate(given["scales"]).reshape(codes.shape[0], -1).repeat_interleave(size, 1)
    if zero is None:
        return codes, torch.zeros_like(codes), scale
    return codes, zero.reshape(codes.shape[0], -1).repeat_interleave(size, 1), scale


def _per_channel(evaluate: StateEval, given: dict[str, Any]) -> _Named:
    codes, zero = evaluate(given["input"]), _value(evaluate, given["zero_points"])
    shape = [1] * codes.dim()
    shape[given["axis"]] = -1
    spread = [
        part.reshape(shape).expand(codes.shape)
        for part in (zero, evaluate(given["scales"]))
        if part is not None
    ]
    return codes, torch.zeros_like(codes) if zero is None else spread[0], spread[-1]


def _per_tensor(evaluate: StateEval, given: dict[str, Any]) -> _Named:
    codes = evaluate(given["input"])
    parts = (_value(evaluate, given[name]) for name in ("zero_point", "scale"))
    zero, scale = (part.reshape(()).expand(codes.shape) for part in parts)
    return codes, zero, scale


_NAMED = {
    "torchao.dequantize_affine": _affine,
    "quantized_decomposed.dequantize_per_channel_group": _per_group,
    "quantized_decomposed.dequantize_per_channel": _per_channel,
    "quantized_decomposed.dequantize_per_tensor": _per_tensor,
}
