"""The function of a layer of routed experts, whatever their weights: routing, two GEMMs, the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from halfbyte.lowering.kernels.generator import ROW_BLOCK, Combine, Route, render


class RoutedExperts(Protocol):
    """What the function needs to know of the layer."""

    @property
    def symbol(self) -> str: ...
    @property
    def inputs(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def io(self) -> str: ...
    @property
    def soft_f16(self) -> bool: ...


def data_types(hidden: int, slots: int, io: str) -> tuple[str, ...]:
    """Types of x, ids and weights."""
    return f"tensor<?x{hidden}x{io}>", f"tensor<?x{slots}xi64>", f"tensor<?x{slots}xf32>"


def routed_text(
    layer: RoutedExperts, sides: str, up: Mapping[str, Any], down: Mapping[str, Any], **more: object
) -> str:
    """The ``util.func`` of the layer.

    Args:
        layer: its shape.
        sides: the template of the dispatches of one side, up or down.
        up, down: what that template takes for each.
        more: what it takes for both.
    """
    return render(
        "moe.mlir.j2",
        name=layer.symbol,
        io=layer.io,
        H=layer.inputs,
        E=layer.experts,
        k=layer.slots,
        row_block=ROW_BLOCK,
        route=Route().symbol,
        combine=Combine(layer.io, layer.soft_f16).symbol,
        sides=sides,
        up=up,
        down=down,
        **more,
    )
