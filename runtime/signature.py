"""Checks the inputs of a call against the entry point, before the program sees them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.device_array import DeviceArray, as_carrier
from halfbyte.runtime.element_types import ELEMENT_TYPES
from halfbyte.runtime.manifest import EntryPoint, Tensor


def check_inputs(
    name: str, entry: EntryPoint, inputs: Sequence[Any], caches: Collection[Tensor] = ()
) -> list[DeviceArray | np.ndarray[Any, Any]]:
    """Returns the inputs, numpy arrays in the carrier dtype.

    Args:
        name: the entry point's name, for messages.
        entry: its signature.
        inputs: numpy arrays or `DeviceArray`.
        caches: inputs the call updates in place; these must be device arrays, or the update would be lost.

    Raises:
        UsageError: wrong number, element type or shape; names the input.
    """
    if len(inputs) != len(entry.inputs):
        raise UsageError(
            "wrong number of inputs",
            where=name,
            found=str(len(inputs)),
            accepted=f"{len(entry.inputs)}: {name}({', '.join(map(str, entry.inputs))})",
        )
    sizes: dict[str, tuple[int, str]] = {}
    checked: list[DeviceArray | np.ndarray[Any, Any]] = []
    for value, tensor in zip(inputs, entry.inputs, strict=True):
        if isinstance(value, DeviceArray):
            if value.dtype != tensor.dtype:
                raise UsageError(
                    "wrong element type", where=_where(name, tensor), found=value.dtype, accepted=tensor.dtype
                )
        elif tensor in caches:
            raise UsageError(
                "caches are updated in place and must be device arrays",
                where=_where(name, tensor),
                found=type(value).__name__,
                accepted="DeviceArray",
                advice="make them with bundle.new_caches()",
            )
        else:
            value = as_carrier(value, ELEMENT_TYPES[tensor.dtype], _where(name, tensor))
        # A token's call has two caches per layer: most shapes are fixed, and equal.
        if value.shape != tensor.shape:
            _check_shape(_where(name, tensor), tuple(value.shape), tensor, sizes)
        checked.append(value)
    return checked


def _where(name: str, tensor: Tensor) -> str:
    return f"{name}, input {tensor.name}"


def _check_shape(
    where: str, shape: tuple[int, ...], tensor: Tensor, sizes: dict[str, tuple[int, str]]
) -> None:
    found = "x".join(map(str, shape)) or "a scalar"
    accepted = "x".join(map(str, tensor.shape)) or "a scalar"
    if len(shape) != len(tensor.shape):
        raise UsageError("wrong number of dimensions", where=where, found=found, accepted=accepted)
    for size, wanted in zip(shape, tensor.shape, strict=True):
        if isinstance(wanted, int):
            if size != wanted:
                raise UsageError("wrong shape", where=where, found=found, accepted=accepted)
            continue
        bound, by = sizes.setdefault(wanted, (size, where))
        if bound != size:
            raise UsageError(
                "sizes contradict each other",
                where=where,
                found=f"{wanted} = {size}",
                accepted=f"{wanted} = {bound}, as in {by}",
            )
