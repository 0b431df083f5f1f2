"""The norms of a program that stand by themselves: the function that each becomes, and its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from halfbyte.lowering.called import Called
from halfbyte.lowering.imported_values import Shaped, constant, is_none
from halfbyte.lowering.kernels.generator import RmsNorm, render
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.kernels.rms_norm import Normalize, NormalizedRows
from halfbyte.lowering.targets.target import Target


def _rms_norm(target: Target, op: Any) -> Called:
    x, *rest = op.operands
    columns = Shaped.of(x).shape[-1]
    assert columns is not None
    return _call(target, op, rest, columns)


def _rms_norm_merged(target: Target, op: Any) -> Called:
    _, first, heads, width, *rest = op.operands
    return _call(target, op, rest, constant(width), constant(first), constant(heads))


def _call(target: Target, op: Any, rest: list[Any], width: int, first: int = 0, heads: int = 1) -> Called:
    """``rest``: weight, eps, plus_one, rounds."""
    x, (weight, eps, plus_one, rounds) = op.operands[0], rest
    given = () if is_none(weight) else (weight,)
    dtype = Shaped.of(weight).dtype if given else None
    shaped, norm = Shaped.of(x), RmsNorm(constant(eps), bool(constant(plus_one)) and dtype is not None)
    rounded = bool(constant(rounds)) and dtype is not None and shaped.dtype != "f32"
    kernel = Normalize(norm, width, shaped.dtype, dtype, rounded, target.platform)
    columns = shaped.shape[-1]
    assert columns is not None
    rows = NormalizedRows(kernel, columns, first, heads)
    sizes = "x".join("d" if size is None else str(size) for size in shaped.shape[:-1])
    symbol = f"{rows.symbol}_{sizes or 'row'}"
    text = render(
        "as_rows.mlir.j2",
        name=symbol,
        callee=rows.symbol,
        shape=shaped.shape[:-1],
        count=shaped.count,
        K=columns,
        N=rows.outputs,
        io=shaped.dtype,
        residual=False,
        weights=[Argument("weight", (width,), dtype)] if dtype else [],
    )
    return Called(symbol, text, (x, *given), (Shaped.of(op.results[0]).type,), (kernel, rows))


NORMS: Mapping[str, Callable[[Target, Any], Called]] = {
    "torch.halfbyte.rms_norm": _rms_norm,
    "torch.halfbyte.rms_norm_merged": _rms_norm_merged,
}
