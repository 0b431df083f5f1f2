"""Bundles of the small checkpoints, each compiled once however many processes run the tests."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

import halfbyte

# For the modules that make checkpoints.
sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoints"))

Compile = Callable[..., Path]
Main = Callable[..., int]
CONTEXT = 64


@pytest.fixture(scope="session")
def compiled(checkpoints: Path) -> Compile:
    """compiled(checkpoint, **options) is a bundle, to be read only."""
    shared = Path(os.environ["HALFBYTE_CACHE"]) / "bundles"

    def compile_once(name: str, **options: Any) -> Path:
        chosen = halfbyte.CompileOptions(**{"max_context": CONTEXT} | options)
        key = hashlib.sha256(f"{name} {chosen}".encode()).hexdigest()[:16]
        shared.mkdir(exist_ok=True)
        with filelock.FileLock(shared / f"{key}.lock"):
            if not (shared / key).is_dir():
                halfbyte.compile(checkpoints / name, shared / key, chosen)
        return shared / key

    return compile_once


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """main(argument, ...) runs the command line in this process and gives its exit code."""

    def run(*arguments: object) -> int:
        import halfbyte.cli

        monkeypatch.setattr(sys, "argv", ["halfbyte", *map(str, arguments)])
        with warnings.catch_warnings(), pytest.raises(SystemExit) as stop:
            halfbyte.cli.main()
        code = stop.value.code
        return code if isinstance(code, int) else int(code is not None)

    return run
