"""Tests that take long and prove what quicker ones prove in another way: for those who set HALFBYTE_SLOW."""

from __future__ import annotations

import os

import pytest

SLOW = "HALFBYTE_SLOW" in os.environ
slow = pytest.mark.skipif(not SLOW, reason="HALFBYTE_SLOW asks for it")
