"""Memory over many loads and calls, and the order in which things are released."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halfbyte.runtime import Conversation, load

ROUNDS, WARM_UP = 200, 50


def _growth(step: Callable[[], object], rounds: int) -> float:
    """KiB of resident memory per step, after a warm-up."""

    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    for _ in range(WARM_UP):
        step()
    before = resident()
    for _ in range(rounds):
        step()
    return (resident() - before) / rounds


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("parameters", ["huge", "mmap"])
def test_loading_does_not_leak(decoder_bundle: Path, parameters: str) -> None:
    def step() -> None:
        load(decoder_bundle, parameters=parameters).call("forward", np.array([1, 2]))

    assert _growth(step, ROUNDS) < 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_calling_does_not_leak(decoder_bundle: Path) -> None:
    bundle = load(decoder_bundle)
    conversation = Conversation(bundle)

    def step() -> None:
        conversation.reset()
        conversation.prefill([1, 2, 3])
        bundle.call("forward", np.array([1, 2]))

    assert _growth(step, 3000) < 0.2


ENDINGS = {
    "results left to the interpreter": "kept = bundle.call_on_device('forward', x)",
    "results after the bundle": "kept = bundle.call_on_device('forward', x); del bundle; kept[0].numpy()",
    "caches after the bundle": "kept = bundle.new_caches(); del bundle",
    "a cycle": "kept = [bundle, bundle.new_caches()]; kept.append(kept); del kept, bundle",
    "an exception": "kept = bundle.call_on_device('forward', x); raise SystemExit(0)",
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ending", ENDINGS)
def test_processes_end_well(decoder_bundle: Path, ending: str, threads: int) -> None:
    """IREE crashes on a buffer that outlives its device."""
    code = (
        "import gc, sys, numpy as np\n"
        "from halfbyte.runtime import load\n"
        f"bundle = load(sys.argv[1], threads={threads})\n"
        "x = np.array([1, 2])\n"
        f"{ENDINGS[ending]}\n"
        "gc.collect()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(decoder_bundle)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
