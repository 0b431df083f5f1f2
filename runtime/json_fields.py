"""Reads the fields of a JSON object one by one and says precisely what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from halfbyte.errors import CheckpointError

T = TypeVar("T")

_NAMES: dict[type, str] = {str: "a string", int: "an integer", list: "a list", dict: "an object"}


def expect(value: Any, kind: type[T], where: str) -> T:
    """Returns ``value`` if it is of the JSON type ``kind``.

    Raises:
        CheckpointError: it is of another type (true and false are no integers).
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError("wrong type of field", where=where, found=repr(value), accepted=_NAMES[kind])
    return value


def natural(value: Any, where: str) -> int:
    """Returns ``value`` if it is an integer >= 0.

    Raises:
        CheckpointError: it is anything else.
    """
    number = expect(value, int, where)
    if number < 0:
        raise CheckpointError("negative number", where=where, found=str(number), accepted="an integer >= 0")
    return number


def text(value: Any, where: str) -> str:
    """Returns ``value`` if it is a string that is not empty.

    Raises:
        CheckpointError: it is anything else.
    """
    string = expect(value, str, where)
    if not string:
        raise CheckpointError("empty string", where=where, accepted="a string that is not empty")
    return string


def array(item: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    """Returns a reader of a JSON list whose elements are read by ``item``."""

    def read(value: Any, where: str) -> tuple[T, ...]:
        return tuple(
            item(element, f"{where}[{index}]") for index, element in enumerate(expect(value, list, where))
        )

    return read


def mapping(item: Callable[[Any, str], T]) -> Callable[[Any, str], dict[str, T]]:
    """Returns a reader of a JSON object of any keys whose values are read by ``item``."""

    def read(value: Any, where: str) -> dict[str, T]:
        return {key: item(entry, f"{where}.{key}") for key, entry in expect(value, dict, where).items()}

    return read


class Fields:
    """A JSON object whose fields are taken one by one; at the end none may be left over.

    Used as a context manager: leaving it without an exception checks for unknown fields.
    """

    def __init__(self, value: Any, where: str) -> None:
        self._where = where
        self._rest = dict(expect(value, dict, where))

    def take(self, name: str, read: Callable[[Any, str], T]) -> T:
        """Reads a field that must be there."""
        if name not in self._rest:
            raise CheckpointError("missing field", where=f"{self._where}.{name}")
        return read(self._rest.pop(name), f"{self._where}.{name}")

    def take_optional(self, name: str, read: Callable[[Any, str], T]) -> T | None:
        """Reads a field that may be absent (or null): then the result is None."""
        value = self._rest.pop(name, None)
        return None if value is None else read(value, f"{self._where}.{name}")

    def __enter__(self) -> Fields:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._rest:
            raise CheckpointError("unknown field", where=self._where, found=", ".join(sorted(self._rest)))
