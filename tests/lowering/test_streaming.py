"""The archive is written tensor by tensor: memory follows from the largest weight, not from the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from slow import slow

HIDDEN, WIDE, GROUP = 2048, 8192, 128
BLOCK_WEIGHTS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE

# A process of its own: it opens the checkpoint, packs its layers (gate and up as one) into an archive, and tells how
# far memory grew meanwhile, the pages of mapped files included.
WRITE = """
import sys
from pathlib import Path
from halfbyte.checkpoints import open_checkpoint
from halfbyte.lowering.archive import write_archive
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.layout import Packing
from halfbyte.lowering.parameters import Parameters
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.merge_linears import join_weights
from halfbyte.passes.program import LayerSource
from halfbyte.passes.scheme import Activations

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
checkpoint, target, parameters = open_checkpoint(folder), CpuTarget.named("x86-64-v3"), Parameters()
merged = {}
for name in checkpoint.layers:
    leaf = name.rpartition(".")[2]
    both = {"gate_proj": "gate_up", "up_proj": "gate_up"}.get(leaf, leaf)
    merged.setdefault(name.removesuffix(leaf) + both, []).append(name)

def source(name, members, outputs):
    return LayerSource(lambda: join_weights(name, map(checkpoint.quantized, members), outputs), None, tuple(members))

for name, members in merged.items():
    first = checkpoint.layers[members[0]]
    outputs = sum(checkpoint.layers[member].shape[0] for member in members)
    scheme = first.scheme
    packing = Packing(outputs, first.shape[1], scheme.group_size, scheme.bits)
    settings = ("f32", scheme.scale_dtype, scheme.zero, False, Activations.INT8, 3, 0, target.platform)
    linear = Linear(target.isa, packing, *settings)
    parameters.add(name, target.pack(name, linear, source(name, members, outputs)))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = memory("VmRSS")
write_archive(out, parameters)
print(memory("VmHWM") - before, out.stat().st_size)
"""


def write_checkpoint(folder: Path, blocks: int) -> None:
    """A llama in GPTQ form with random words, a shard per block."""
    folder.mkdir()
    random, weight_map = np.random.default_rng(0), {}

    def shard(name: str, tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    shapes = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
    }
    norm = np.ones(HIDDEN, np.float16)
    shard(
        "outer.safetensors",
        {"model.embed_tokens.weight": np.ones((8, HIDDEN), np.float16), "model.norm.weight": norm},
    )
    for number in range(blocks):
        tensors = {"input_layernorm.weight": norm, "post_attention_layernorm.weight": norm}
        for name, (outputs, inputs) in shapes.items():
            words = random.integers(-(2**31), 2**31, (inputs // 8, outputs), dtype=np.int64)
            tensors[f"{name}.qweight"] = words.astype(np.int32)
            tensors[f"{name}.qzeros"] = np.full((inputs // GROUP, outputs // 8), 0x77777777, np.int32)
            tensors[f"{name}.scales"] = random.normal(size=(inputs // GROUP, outputs)).astype(np.float16)
        shard(
            f"{number}.safetensors",
            {f"model.layers.{number}.{name}": value for name, value in tensors.items()},
        )
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": blocks,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "vocab_size": 8,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "megabytes",
    [
        400,
        pytest.param(2000, marks=slow),
    ],
)
def test_memory_follows_from_the_largest_weight(tmp_path: Path, megabytes: int) -> None:
    blocks = -(-megabytes * 2**20 * 2 // BLOCK_WEIGHTS)
    write_checkpoint(tmp_path / "model", blocks)
    command = [sys.executable, "-c", WRITE, str(tmp_path / "model"), str(tmp_path / "model.irpa")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > megabytes * 2**20
    # gate and up: the words of the file, a byte per code, and the packed weight.
    largest = 2 * WIDE * HIDDEN * (0.5 + 1 + 0.5)
    assert grown < 1.3 * largest + 48 * 2**20 < size / 2.5
