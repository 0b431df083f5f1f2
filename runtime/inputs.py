"""Inputs of a call as iree-run-module takes them on its command line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.device_array import as_carrier
from halfbyte.runtime.element_types import ELEMENT_TYPES, ElementType

GRAMMAR = (
    "2x3xf32=1,2,3,4,5,6 (or spaces, or [1 2 3][4 5 6]), 4xi64=7 (one value for all), 4xi64 (zeros), "
    "i32=3 or 3 (a scalar), @file.npy, 2x3xbf16=@file.bin (raw values)"
)
_SHAPED = re.compile(r"((?:\d+x)*)([A-Za-z]\w*)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d|\.\d)[\w.+-]*|[-+]?(inf|nan)", re.IGNORECASE)


def parse_input(text: str, dtype: str) -> np.ndarray[Any, Any]:
    """Returns the array an input text stands for.

    Args:
        text: see `GRAMMAR`.
        dtype: element type the program wants, e.g. ``i64``; ``si64`` counts as the same. A .npy file must
            hold it; bf16 and 8-bit floats, which .npy cannot name, as raw bits in unsigned integers.

    Returns:
        An array of the element type's carrier dtype.

    Raises:
        UsageError: the text is malformed or a file does not fit; shows the grammar.
    """
    wanted = ELEMENT_TYPES[dtype]
    if text.startswith("@"):
        return as_carrier(_load_npy(text), wanted, text)
    match = _SHAPED.fullmatch(text)
    if match is None or match[2] not in ELEMENT_TYPES or (not match[1] and match[3] is None):
        if _NUMBER.fullmatch(text):
            return _numbers([text], wanted, text).reshape(())
        raise UsageError("malformed input", found=repr(text), accepted=GRAMMAR)
    element = ELEMENT_TYPES[match[2]]
    if element.hal_name != wanted.hal_name:
        raise UsageError("wrong element type", where=text, found=element.name, accepted=dtype)
    shape = tuple(int(size) for size in match[1].split("x")[:-1])
    values = match[3] or ""
    if values.startswith("@"):
        return _load_binary(values, shape, element)
    return _parse_values(values, shape, element, text)


def _parse_values(
    values: str, shape: tuple[int, ...], element: ElementType, where: str
) -> np.ndarray[Any, Any]:
    parts = [part for part in re.split(r"[\s,\[\]]+", values) if part]
    if not parts:
        return np.zeros(shape, element.carrier)
    numbers = _numbers(parts, element, where)
    if len(numbers) == 1:
        return np.full(shape, numbers[0], element.carrier)
    if len(numbers) != math.prod(shape):
        raise UsageError(
            "wrong number of values",
            where=where,
            found=str(len(numbers)),
            accepted=f"{math.prod(shape)}, or one for all",
        )
    return numbers.reshape(shape)


def _numbers(parts: list[str], element: ElementType, where: str) -> np.ndarray[Any, Any]:
    """One dimension, in the carrier dtype; floats are rounded to nearest, integers must fit."""
    try:
        if element.carrier.kind == "b":
            return np.array([int({"true": "1", "false": "0"}.get(part, part), 0) for part in parts]) != 0
        if element.carrier.kind == "f" or element.bits_only:
            with np.errstate(over="ignore"):  # 1e99 is inf in f32, as everywhere
                floats = np.array([float(part) for part in parts]).astype(element.values)
            return floats.view(element.carrier)
        return np.array([int(part, 0) for part in parts], element.carrier)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"not {element.name}", where=where, found=str(error), accepted=GRAMMAR) from None


def _load_npy(text: str) -> np.ndarray[Any, Any]:
    path = Path(text[1:])
    if path.suffix != ".npy":
        raise UsageError("a file without a type", where=text, accepted="@file.npy, or 2x3xbf16=@file.bin")
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError("unreadable file", where=str(path), found=str(error), accepted=GRAMMAR) from None
    if array.dtype.kind == "V":  # how numpy saves the types it does not know
        raise UsageError(
            "a .npy file cannot hold bf16 or 8-bit floats",
            where=str(path),
            found=str(array.dtype),
            accepted="raw values with their shape, e.g. 2x3xbf16=@file.bin",
        )
    return np.asarray(array)


def _load_binary(text: str, shape: tuple[int, ...], element: ElementType) -> np.ndarray[Any, Any]:
    path = Path(text[1:])
    if path.suffix == ".npy":
        raise UsageError("shape and .npy together", where=text, accepted="@file.npy without a shape")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError("unreadable file", where=str(path), found=str(error)) from None
    wanted = math.prod(shape) * element.bytes
    if len(content) != wanted:
        raise UsageError(
            "file of another size", where=str(path), found=f"{len(content)} bytes", accepted=f"{wanted} bytes"
        )
    return np.frombuffer(content, element.carrier).reshape(shape).copy()
