"""Puts the folder of these tests on the path, for the modules they share; the folder of checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def data() -> Path:
    """Small checkpoints by the tools people use, good and malformed, with expected values."""
    return Path(__file__).parent.parent / "data" / "checkpoints"
