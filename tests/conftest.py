"""What all tests share: a path for the modules beside this file, the checkpoints, a cache of compiled programs."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slow import SLOW

# Never the user's cache of compiled programs. pytest-xdist's workers inherit the variable and share one folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HALFBYTE_CACHE"] = tempfile.mkdtemp(prefix="halfbyte-tests-")
    atexit.register(shutil.rmtree, os.environ["HALFBYTE_CACHE"], ignore_errors=True)

# iree-compile verifies what each of its passes has made, which is two fifths of its time and changes no program
# (tests/lowering/test_compiler.py). What it is given is verified in any case.
if not SLOW:
    os.environ.setdefault("HALFBYTE_IREE_FLAGS", "--verify=false")
# Of the iree-compile that pytest-xdist's workers start, not of themselves: tests look at how their memory grows.
if "PYTEST_XDIST_WORKER" in os.environ:
    # It allocates and frees all the time: larger pieces from the system, on large pages, save an eighth of its time.
    os.environ.setdefault(
        "GLIBC_TUNABLES",
        "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=1000:glibc.malloc.top_pad=67108864",
    )
    # Where every core has a process of tests, its threads only wait for each other.
    if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) >= (os.cpu_count() or 1):
        flags = os.environ.get("HALFBYTE_IREE_FLAGS", "")
        os.environ["HALFBYTE_IREE_FLAGS"] = f"{flags} --mlir-disable-threading"


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Small checkpoints by the tools people use, good and malformed, with expected values."""
    return Path(__file__).parent / "data" / "checkpoints"


@pytest.fixture(scope="session")
def portable() -> str:
    """An older CPU that this one can stand in for, with kernels of its own, or host."""
    from halfbyte.lowering.targets.cpu import CpuTarget
    from halfbyte.runtime.cpu_features import architecture, host_features

    target = CpuTarget.named("x86-64-v3")
    fits = architecture() == target.architecture and target.features <= host_features()
    return "x86-64-v3" if fits else "host"
