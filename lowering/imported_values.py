"""Values, types and operations of an imported module, as the splicer handles them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from halfbyte.errors import CompilerError

_VTENSOR = re.compile(r"!torch\.vtensor<\[(.*)\],([\w]+)>$")


@dataclass(frozen=True)
class Shaped:
    """A tensor type: None for a dynamic dimension, MLIR's signless element type."""

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Shaped:
        match = _VTENSOR.match(str(value.type))
        if match is None:
            raise CompilerError(
                f"a halfbyte operator was given {value.type}, not a tensor with a known shape"
            )
        shape = tuple(None if size == "?" else int(size) for size in match[1].split(",")) if match[1] else ()
        return cls(shape, re.sub(r"^[us]i", "i", match[2]))

    @property
    def type(self) -> str:
        return f"tensor<{''.join('?x' if size is None else f'{size}x' for size in self.shape)}{self.dtype}>"

    @property
    def count(self) -> int | None:
        sizes = [size for size in self.shape[:-1] if size is not None]
        return math.prod(sizes) if len(sizes) == len(self.shape) - 1 else None


def operators(function: Any) -> list[Any]:
    found = []

    def visit(op: Any) -> Any:
        if op.name == "torch.operator":
            found.append(op)
        return ir.WalkResult.ADVANCE

    function.operation.walk(visit)
    return found


def create(
    name: str, results: list[Any], operands: list[Any], attributes: dict[str, Any] | None = None
) -> Any:
    return ir.Operation.create(name, results=results, operands=operands, attributes=attributes or {}).result


def call(name: str, results: list[str], operands: list[Any]) -> list[Any]:
    types = [ir.Type.parse(result) for result in results]
    attributes = {"callee": ir.FlatSymbolRefAttr.get(name)}
    return list(
        ir.Operation.create("util.call", results=types, operands=operands, attributes=attributes).results
    )


def builtin(value: Any) -> Any:
    return create("torch_c.to_builtin_tensor", [ir.Type.parse(Shaped.of(value).type)], [value])


def replace(op: Any, values: list[Any]) -> None:
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(create("torch_c.from_builtin_tensor", [result.type], [value]))
    op.operation.erase()


def constant(value: Any) -> Any:
    return value.owner.attributes["value"].value


def is_none(value: Any) -> bool:
    """Whether an operand is torch's None, or left out."""
    return value is None or str(value.type) == "!torch.none"
