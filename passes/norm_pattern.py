"""The forms in which graphs spell RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from halfbyte.passes.graph_patterns import CASTS, calls, factors, itself
from halfbyte.passes.ops.rms_norm import NORM_DTYPES

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Norm:
    """One norm over the last dimension: ``halfbyte::rms_norm`` of these is its value.

    Attributes:
        x: of the dtype of the result.
        weight: [K], or None.
        eps, plus_one, rounds: see the operator.
    """

    x: Node
    weight: Node | None
    eps: float
    plus_one: bool = False
    rounds: bool = False


def norm_of(node: Any) -> Norm | None:
    """The norm whose value a node is, or None.

    Forms: ``x * rsqrt(mean(x^2) + eps)`` in float32, times nothing, a weight or ``1 + weight``, then cast to the
    dtype of x; or cast before the weight of that dtype multiplies it; or torch's own ``rms_norm``.
    """
    if calls(node, _aten.rms_norm.default, _aten._fused_rms_norm.default):
        x, shape, weight, eps = (*node.args, None, None)[:4]
        known = eps is not None and len(shape) == 1 and _fits(weight, x)
        return Norm(x, weight, float(eps)) if known and node.target is _aten.rms_norm.default else None
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype not in NORM_DTYPES:
        return None
    if value.dtype is torch.float32:
        return _in_float32(node)
    narrow = _cast_from(node, torch.float32)
    if narrow is not None:
        return _of_narrow(_in_float32(narrow), value.dtype)
    for weight, rounded in factors(node, _aten.mul.Tensor):
        wide = _cast_from(rounded, torch.float32)
        even = None if wide is None else _of_narrow(_even(wide), value.dtype)
        if even is not None and _fits(weight, even.x) and weight.meta["val"].dtype is value.dtype:
            return Norm(even.x, weight, even.eps, rounds=True)
    return None


def left_norms(graph: torch.fx.Graph) -> list[Node]:
    """The nodes of a graph that look like the mean of a norm's squares, or are norms as a whole."""
    found = []
    for node in graph.nodes:
        if calls(node, _aten.rms_norm.default, _aten._fused_rms_norm.default):
            found.append(node)
        elif calls(node, _aten.mean.dim):
            squared = _squared(itself(node.args[0]))
            if squared is not None and not calls(squared, _aten.sub.Tensor):  # a LayerNorm's
                found.append(node)
    return found


def obstacle(node: Node) -> str:
    """Why a node of `left_norms` became none of ours."""
    if not calls(node, _aten.mean.dim):
        return "its eps is not given, or it norms more than the last dimension"
    rows, dimensions, *_ = cast("tuple[Any, ...]", node.args)
    if list(dimensions) not in ([-1], [rows.meta["val"].dim() - 1]):
        return f"its mean is that of dimensions {list(dimensions)}; [-1] is accepted"
    dtype = node.meta["val"].dtype
    if dtype is not torch.float32:
        return f"its mean is of {dtype}; torch.float32 is accepted"
    return (
        "none of the forms that are known: x * rsqrt(mean(x^2) + eps) in float32, times a weight, cast to the dtype of "
        "x at the end or before the weight"
    )


def _in_float32(node: Any) -> Norm | None:
    """A norm whose product with the weight is float32."""
    for given, scaled in factors(node, _aten.mul.Tensor):
        weight, plus_one = _factor(given)
        even = _even(scaled)
        if even is not None and _fits(weight, even.x):
            return Norm(even.x, weight, even.eps, plus_one)
    return _even(node)


def _even(node: Any) -> Norm | None:
    """A norm before a weight."""
    for x, root in factors(node, _aten.mul.Tensor):
        eps = _eps(root, x)
        if eps is not None:
            return Norm(x, None, eps)
    return None


def _of_narrow(norm: Norm | None, dtype: torch.dtype) -> Norm | None:
    """The same norm of what its rows were cast from, if that has the dtype."""
    if norm is None:
        return None
    x = _cast_from(norm.x, dtype)
    return None if x is None else Norm(x, norm.weight, norm.eps, norm.plus_one)


def _cast_from(node: Any, dtype: torch.dtype) -> Any:
    """What a node casts, if it is of a dtype."""
    node = itself(node)
    before = itself(node.args[0]) if calls(node, *CASTS) else None
    return before if before is not None and before.meta["val"].dtype is dtype else None


def _factor(given: Any) -> tuple[Any, bool]:
    """The weight of ``weight`` or ``1 + weight``."""
    if calls(given, _aten.add.Tensor) and not given.kwargs and given.meta["val"].dtype is torch.float32:
        for one, other in (given.args, given.args[::-1]):
            if isinstance(one, int | float) and one == 1:
                return _narrowest(other), True
    return _narrowest(given), False


def _narrowest(weight: Any) -> Any:
    """What a weight was widened from."""
    weight = itself(weight)
    if calls(weight, *CASTS) and weight.meta["val"].dtype is torch.float32:
        before = itself(weight.args[0])
        return before if before.meta["val"].dtype in NORM_DTYPES else weight
    return weight


def _fits(weight: Any, x: Any) -> bool:
    """Whether it is a weight of the norm of x."""
    value = weight.meta.get("val") if isinstance(weight, Node) else None
    return weight is None or (
        isinstance(value, torch.Tensor)
        and value.dtype in NORM_DTYPES
        and list(value.shape) == [x.meta["val"].shape[-1]]
    )


def _eps(root: Any, x: Any) -> float | None:
    """The eps of ``rsqrt(mean(x^2) + eps)``, or None."""
    inverse = calls(root, _aten.rsqrt.default)
    if not inverse and not (calls(root, _aten.pow.Tensor_Scalar) and root.args[1] == -0.5):
        return None
    shifted = itself(root.args[0])
    if not calls(shifted, _aten.add.Tensor) or not isinstance(shifted.args[1], float) or shifted.kwargs:
        return None
    mean, value = itself(shifted.args[0]), x.meta["val"] if isinstance(x, Node) else None
    if not calls(mean, _aten.mean.dim) or value is None or value.dtype is not torch.float32:
        return None
    last = list(mean.args[1]) in ([-1], [value.dim() - 1])
    whole = last and mean.args[2:] == (True,) and not mean.kwargs and isinstance(value.shape[-1], int)
    return float(shifted.args[1]) if whole and _squared(itself(mean.args[0])) is x else None


def _squared(square: Any) -> Any:
    """What a node squares, or None."""
    if (calls(square, _aten.pow.Tensor_Scalar) and square.args[1] == 2) or calls(
        square, _aten.square.default
    ):
        return itself(square.args[0])
    if calls(square, _aten.mul.Tensor) and itself(square.args[0]) is itself(square.args[1]):
        return itself(square.args[0])
    return None
