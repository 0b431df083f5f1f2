"""Values of a quantization configuration, checked for their types."""

from __future__ import annotations

from typing import Any

from halfbyte.errors import CheckpointError


def flag(values: dict[str, Any], key: str, where: str) -> bool | None:
    """true, false, or None when nothing is said."""
    value = values.get(key)
    if value is not None and type(value) is not bool:
        raise CheckpointError(
            f"{key} is impossible", where=where, found=repr(value)[:100], accepted="true or false"
        )
    return value


def mapping(values: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """An object, empty when nothing is said."""
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} is no object", where=where, found=type(value).__name__)
    return value


def names(values: dict[str, Any], key: str, where: str) -> list[str]:
    """A text with commas, a list, or a list of lists, as one list of names; empty when nothing is said."""
    value = values.get(key)
    if value is None:
        return []
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if isinstance(value, list):
        flat = [name for part in value for name in (part if isinstance(part, list) else [part])]
        if all(isinstance(name, str) for name in flat):
            return flat
    raise CheckpointError(f"{key} is no list of names", where=where, found=repr(value)[:200])


def accept(value: Any, accepted: tuple[Any, ...], key: str, where: str, advice: str | None = None) -> None:
    """Raises a `CheckpointError` unless `value` is one of `accepted`, and of its type."""
    if not any(value == one and type(value) is type(one) for one in accepted):
        raise CheckpointError(
            f"{key} is not one this version reads",
            where=where,
            found=repr(value)[:100],
            accepted=", ".join(str(one) for one in accepted),
            advice=advice,
        )
