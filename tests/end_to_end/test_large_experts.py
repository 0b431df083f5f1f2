"""A model with many experts, shaped like Qwen3-30B-A3B: its archive takes the memory of a few experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_large_experts import LargeModel, write_large_experts

import halfbyte
from halfbyte.runtime import Conversation

MODEL = LargeModel(
    layers=2,
    hidden=512,
    inner=384,
    heads=8,
    key_heads=2,
    head_dim=64,
    dense=1024,
    vocabulary=32,
    positions=64,
)

# A process of its own: how far memory grows while the archive is written.
COMPILE = """
import sys
from pathlib import Path
import halfbyte
from halfbyte.compile_model import compile_model
from halfbyte.progress import Progress

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

class Watch(Progress):
    before = 0
    def phase(self, name):
        if name == "write":
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self.before = memory("VmRSS")

watch = Watch()
compile_model(sys.argv[1], sys.argv[2], halfbyte.CompileOptions(max_context=32), watch)
print(memory("VmHWM") - watch.before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_experts_stream_into_the_archive(tmp_path: Path) -> None:
    write_large_experts(tmp_path / "model", MODEL)
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "model"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    bundle = halfbyte.load(tmp_path / "out")
    [archive] = bundle.manifest.parameters
    assert archive.bytes > MODEL.expert_bytes > 70e6
    scales = sum(tensor.bytes for key, tensor in archive.tensors.items() if key.endswith(".scale"))
    assert grown < scales + 16 * 2**20 < MODEL.expert_bytes / MODEL.layers
    conversation = Conversation(bundle)
    first, second = conversation.prefill([1, 2, 3, 30]), conversation.step(7)
    assert np.isfinite(first).all() and np.isfinite(second).all() and np.ptp(second) > 0.01
    found = halfbyte.inspect(tmp_path / "model").parameters
    assert (found.blocks, found.experts, found.experts_per_token) == (
        MODEL.layers,
        MODEL.experts,
        MODEL.chosen,
    )
