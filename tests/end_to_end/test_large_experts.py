"""A model with many experts, shaped like Qwen3-30B-A3B: its archive takes the memory of a few experts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import halfbyte
from halfbyte.runtime import Conversation

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS, GROUP = 512, 384, 128, 8, 2, 128
CODES = LAYERS * EXPERTS * 3 * HIDDEN * INNER // 2

# A process of its own: how far memory grows while the archive is written.
COMPILE = """
import sys
from pathlib import Path
import halfbyte
from halfbyte.compile_model import Progress, compile_model

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


def write_checkpoint(folder: Path) -> None:
    """compressed-tensors W4A16, random words, a shard per layer."""
    folder.mkdir()
    random, weight_map = np.random.default_rng(0), {}

    def linear(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        words = random.integers(-(2**31), 2**31, (outputs, inputs // 8), dtype=np.int64).astype(np.int32)
        scales = random.uniform(0.002, 0.01, (outputs, inputs // GROUP)).astype(np.float32)
        packed, scale = torch.from_numpy(words), torch.from_numpy(scales).bfloat16()
        return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale}

    def shard(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    draw = lambda *shape: torch.from_numpy(random.normal(size=shape) * 0.1).bfloat16()  # noqa: E731
    one = lambda size: torch.ones(size, dtype=torch.bfloat16)  # noqa: E731
    ends = {"model.embed_tokens.weight": draw(32, HIDDEN), "lm_head.weight": draw(32, HIDDEN)}
    shard("ends.safetensors", ends | {"model.norm.weight": one(HIDDEN)})
    for number in range(LAYERS):
        block = f"model.layers.{number}"
        tensors = {
            f"{block}.{name}.weight": one(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= {f"{block}.self_attn.{name}_norm.weight": one(64) for name in "qk"}
        for name, shape in {
            "q": (512, HIDDEN),
            "k": (128, HIDDEN),
            "v": (128, HIDDEN),
            "o": (HIDDEN, 512),
        }.items():
            tensors |= linear(f"{block}.self_attn.{name}_proj", *shape)
        tensors[f"{block}.mlp.gate.weight"] = draw(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            path = f"{block}.mlp.experts.{expert}"
            tensors |= linear(f"{path}.gate_proj", INNER, HIDDEN) | linear(f"{path}.up_proj", INNER, HIDDEN)
            tensors |= linear(f"{path}.down_proj", HIDDEN, INNER)
        shard(f"{number}.safetensors", tensors)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": 1024,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_experts_stream_into_the_archive(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "model"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    bundle = halfbyte.load(tmp_path / "out")
    [archive] = bundle.manifest.parameters
    assert archive.bytes > CODES > 70e6
    scales = sum(tensor.bytes for key, tensor in archive.tensors.items() if key.endswith(".scale"))
    assert grown < scales + 16 * 2**20 < CODES / LAYERS
    conversation = Conversation(bundle)
    first, second = conversation.prefill([1, 2, 3, 30]), conversation.step(7)
    assert np.isfinite(first).all() and np.isfinite(second).all() and np.ptp(second) > 0.01
    found = halfbyte.inspect(tmp_path / "model").parameters
    assert (found.blocks, found.experts, found.experts_per_token) == (LAYERS, EXPERTS, CHOSEN)
