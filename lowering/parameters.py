"""The tensors of a program's archive: what they are called, how large they are, and how to get them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

_BITS = {"f64": 64, "i64": 64, "f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16, "i8": 8}

# MLIR element type -> a numpy dtype of its size, to carry its bits.
NUMPY = {
    "f64": "f8",
    "i64": "i8",
    "f32": "f4",
    "i32": "i4",
    "f16": "u2",
    "bf16": "u2",
    "i16": "i2",
    "i8": "u1",
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its key in the archive, shape, and MLIR element type."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _BITS[self.dtype] // 8

    @property
    def type(self) -> str:
        return f"tensor<{''.join(f'{size}x' for size in self.shape)}{self.dtype}>"


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors that are made together: the parts of one packed weight, or one float tensor.

    Attributes:
        tensors: what they are.
        make: gives them, by key, as arrays of exactly `TensorSpec.bytes` bytes (any dtype: bytes count). A tensor
            may come in pieces; whoever takes them takes the tensors in order, each to its end, because a later
            tensor may be known only then.
    """

    tensors: tuple[TensorSpec, ...]
    make: Callable[[], Mapping[str, np.ndarray | Iterator[np.ndarray]]]


@dataclass
class Parameters:
    """All groups of a program, each once, in the order they were first used."""

    groups: dict[str, ParameterGroup] = field(default_factory=dict)

    def add(self, name: str, group: ParameterGroup) -> ParameterGroup:
        """The group of that name; the given one if there was none, or if it has more tensors than that had."""
        known = self.groups.get(name)
        if known is None or set(known.tensors) < set(group.tensors):
            self.groups[name] = group
        return self.groups[name]

    @property
    def tensors(self) -> list[TensorSpec]:
        return [tensor for group in self.groups.values() for tensor in group.tensors]
