"""A layer of routed experts, whatever their weights: routing, two GEMMs with what comes before each, the sum."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from halfbyte.lowering.kernels.generator import ROW_BLOCK, Combine, Glu, Kernel, Route, render
from halfbyte.lowering.kernels.linear import Argument
from halfbyte.lowering.kernels.platform import CPU, Platform


class ColumnPacking(Protocol):
    """What the layer needs to know of the packing of an expert's linear."""

    @property
    def inputs(self) -> int: ...
    @property
    def column_blocks(self) -> int: ...


Packed = TypeVar("Packed", bound=ColumnPacking)


@dataclass(frozen=True)
class RoutedLinear(abc.ABC, Generic[Packed]):
    """One linear of the experts.

    Attributes:
        kind: ``up`` holds gate and up, whose blocks of 64 columns take turns; or ``down``.
        packing: of one expert's linear; of gate and of up alike.
        bias: whether a bias is added.
    """

    kind: Literal["up", "down"]
    packing: Packed
    bias: bool

    @property
    def blocks_per_expert(self) -> int:
        """Blocks of 64 columns."""
        return self.packing.column_blocks * (2 if self.kind == "up" else 1)

    def arguments(self, experts: int) -> tuple[Argument, ...]:
        """The tensors of all experts, as the dense linear has them for their columns side by side."""
        blocks = experts * self.blocks_per_expert
        bias = (Argument(f"{self.kind}.bias", (64 * blocks,), "f32"),) if self.bias else ()
        return (*self._weight(blocks), *bias)

    @abc.abstractmethod
    def _weight(self, blocks: int) -> tuple[Argument, ...]:
        """The tensors of the weight, of so many blocks of columns."""


Linear = TypeVar("Linear", bound="RoutedLinear[Any]")


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(abc.ABC, Generic[Linear]):
    """One shape of routed experts.

    Attributes:
        experts: their number.
        slots: experts of a token.
        up, down: their linears.
        io: dtype of x and y.
        glu: the product of gate and up.
        platform: the kind of device.
    """

    experts: int
    slots: int
    up: Linear
    down: Linear
    io: str
    glu: Glu
    platform: Platform = CPU

    sides: ClassVar[str]  # the template of the dispatches of one side, up or down

    @abc.abstractmethod
    def before(self, linear: Linear) -> Kernel:
        """The kernel that makes of a linear's inputs what its GEMM takes."""

    @abc.abstractmethod
    def gemm(self, linear: Linear) -> Kernel:
        """The GEMM of a linear."""

    @property
    @abc.abstractmethod
    def symbol(self) -> str:
        """The function's name, which carries every value of the shape."""

    def more(self) -> dict[str, object]:
        """What the template of the sides takes for both."""
        return {}

    def _of_side(self, linear: Linear) -> dict[str, object]:
        """What the template of the sides takes for one, beyond what all have."""
        return {}

    @property
    def inputs(self) -> int:
        return int(self.up.packing.inputs)

    @property
    def outputs(self) -> int:
        return self.inputs

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        linears = (self.up, self.down)
        pairs = [kernel for linear in linears for kernel in (self.before(linear), self.gemm(linear))]
        return (Route(self.platform), *pairs, self._combine)

    @property
    def label(self) -> str:
        """The GEMMs of the layer, for reports."""
        return " / ".join(self.gemm(linear).symbol for linear in (self.up, self.down))

    @property
    def data(self) -> tuple[str, ...]:
        """Types of what the function takes before the experts' tensors: x, ids, weights."""
        hidden, slots = self.inputs, self.slots
        return f"tensor<?x{hidden}x{self.io}>", f"tensor<?x{slots}xi64>", f"tensor<?x{slots}xf32>"

    @property
    def result(self) -> str:
        """Type of what it gives."""
        return self.data[0]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The packed experts' tensors, in order."""
        return (*self.up.arguments(self.experts), *self.down.arguments(self.experts))

    def text(self) -> str:
        """The ``util.func`` of this shape; the kernels it dispatches are separate (`kernels`)."""
        return render(
            "moe.mlir.j2",
            name=self.symbol,
            io=self.io,
            H=self.inputs,
            E=self.experts,
            k=self.slots,
            row_block=ROW_BLOCK,
            route=Route(self.platform).symbol,
            combine=self._combine.symbol,
            sides=self.sides,
            up=self._side(self.up),
            down=self._side(self.down),
            device=self.platform.device,
            **self.more(),
        )

    @property
    def _combine(self) -> Combine:
        return Combine(self.io, self.platform)

    def _side(self, linear: Linear) -> dict[str, object]:
        return {
            "packing": linear.packing,
            "blocks_per_expert": linear.blocks_per_expert,
            "arguments": linear.arguments(self.experts),
            "quantize": self.before(linear).symbol,
            "gemm": self.gemm(linear).symbol,
            **self._of_side(linear),
        }
