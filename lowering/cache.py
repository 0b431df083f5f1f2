"""The cache of compiled programs, imports, tokenizers and measurements: files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Where they are kept: $HALFBYTE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("HALFBYTE_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("halfbyte")) / "programs"


def keep(place: Path, content: bytes) -> None:
    """Writes a file of the cache; whoever reads it meanwhile finds the old one, or none."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.rename(place)
