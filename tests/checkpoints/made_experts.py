"""Small models with experts made by hand: transformers' own model holds what the written checkpoint dequantizes to."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from made_compressed_tensors import group, int_parts, packed_parts, signed_layer, spread
from safetensors.torch import save_file

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
_LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 6, "norm_topk_prob": False},
    "granitemoe": {
        "num_local_experts": 6,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "deepseek_v2 greedy": _LATENT | {"topk_method": "greedy", "n_group": None, "topk_group": None},
    "deepseek_v2 group_limited_greedy": _LATENT
    | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "q_lora_rank": 24},
    "deepseek_v3": _LATENT | {"n_group": 3, "topk_group": 2, "norm_topk_prob": True, "q_lora_rank": 24},
    "granitemoeshared": {"num_local_experts": 6, "shared_intermediate_size": 48, "logits_scaling": 2.0},
    "minimax_m2": {"num_local_experts": 6},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_intermediate_size": 40, "moe_k": 2},
    "glm4_moe": {
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "llama4_text": {
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "intermediate_size": 40,
        "intermediate_size_mlp": 88,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 4,
        "floor_scale": 3,
        "attn_scale": 0.3,
    },
    "llama4_text two experts per token": {
        "num_local_experts": 6,
        "intermediate_size": 40,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": False,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
}


@dataclass(frozen=True)
class Codes:
    """Signed codes [N, K], zero points [N, G] and scales [N, G], inputs per group."""

    codes: np.ndarray
    zeros: np.ndarray | None
    scales: np.ndarray
    size: int

    def dequantized(self) -> torch.Tensor:
        group = np.arange(self.codes.shape[1]) // self.size
        shifted = self.codes if self.zeros is None else self.codes - self.zeros[:, group]
        return torch.from_numpy(shifted.astype(np.float32) * self.scales[:, group])

    @property
    def weights(self) -> dict[str, Any]:
        """What a group of compressed-tensors says."""
        symmetric = self.zeros is None
        return {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": self.size, "symmetric": symmetric,
        }  # fmt: skip

    def parts(self, name: str, packed: bool = True) -> dict[str, torch.Tensor]:
        """As compressed-tensors writes them."""
        made = (packed_parts if packed else int_parts)(name, self.codes, self.zeros, self.scales)
        return {key: torch.from_numpy(np.ascontiguousarray(part)) for key, part in made.items()}


@dataclass(frozen=True)
class Fp8Codes:
    """Bits of e4m3 weights [N, K] and scales [blocks of N, blocks of K]."""

    bits: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]

    def dequantized(self) -> torch.Tensor:
        values = self.bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return torch.from_numpy(values * spread(self.scales, (len(values), values.shape[1]), self.block))

    @property
    def weights(self) -> dict[str, Any]:
        if self.block == (1, self.bits.shape[1]):
            return {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        block = list(self.block)
        return {
            "num_bits": 8, "type": "float", "strategy": "block", "block_structure": block, "symmetric": True,
        }  # fmt: skip

    def parts(self, name: str, packed: bool = True, scale: str = "weight_scale") -> dict[str, torch.Tensor]:
        weight = torch.from_numpy(self.bits).view(torch.float8_e4m3fn)
        return {f"{name}.weight": weight, f"{name}.{scale}": torch.from_numpy(self.scales)}


@dataclass
class Made:
    """A checkpoint's tensors and the model that it stands for.

    Attributes:
        model: transformers', in float32.
        tensors: of the file.
        codes: of the quantized layers, by name.
    """

    model: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    codes: dict[str, Codes | Fp8Codes] = field(default_factory=dict)

    def logits(self, tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            found = self.model(torch.tensor([tokens])).logits[0].numpy()
        assert isinstance(found, np.ndarray)
        return found


def random_codes(name: str, shape: tuple[int, int], seed: int) -> Codes:
    """int4 in groups of 8 (experts' down) or 16 inputs, symmetric in every other expert."""
    size = 8 if name.endswith("down_proj") else 16
    codes, zeros, scales = signed_layer(shape, -(-shape[1] // size), seed)
    symmetric = name.split(".experts.")[-1].split(".")[0] in ("0", "2", "4") or ".experts." not in name
    return Codes(codes, None if symmetric else zeros, scales / np.float32(8), size)


def random_fp8(name: str, shape: tuple[int, int], seed: int) -> Fp8Codes:
    """Every finite bit pattern; blocks of 32 x 16, of which the last are partial."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, shape).astype(np.uint8)
    bits[(bits & 127) == 127] = 0x3C
    grid = (-(-shape[0] // 32), -(-shape[1] // 16))
    return Fp8Codes(bits, random.uniform(0.0005, 0.003, grid).astype(np.float32), (32, 16))


def made_model(
    family: str, seed: int = 0, families: dict[str, dict[str, Any]] = FAMILIES, **changes: Any
) -> Made:
    """transformers' model of one of the families, with random weights; behind its name stands which of its kinds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = copy.deepcopy(BASE | families[family] | changes)  # transformers writes into what it is given
    config = AutoConfig.for_model(family.split()[0], **said)
    return drawn(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval(), seed)


def drawn(model: Any, seed: int) -> Made:
    """A model with random weights."""
    random = torch.Generator().manual_seed(seed)
    kept = model.state_dict().keys()  # no buffers that the configuration leads to
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name not in kept:
                continue
            wide = 0.3 if value.dim() > 1 else 0.1
            values = torch.randn(value.shape, generator=random) * wide
            value.copy_(1 + values if "norm" in name and name.endswith("weight") else values)
    return Made(model)


def quantize(
    made: Made,
    quantizes: Callable[[str], bool],
    draw: Callable[[str, tuple[int, int], int], Codes | Fp8Codes] = random_codes,
) -> None:
    """Fills `codes` and `tensors`, and puts the dequantized weights into the model."""
    model = made.model
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
                _experts(made, path, module, quantizes, draw)
            elif isinstance(module, torch.nn.Linear) and quantizes(path):
                module.weight.copy_(_layer(made, path, module.weight, quantizes, draw))
    held = dict(model.named_parameters()) | {
        name: value for name, value in model.named_buffers() if name in model.state_dict()
    }
    for name, value in held.items():
        if name.removesuffix(".weight") not in made.codes and ".experts." not in name:
            made.tensors[name] = value.detach().clone()


def _layer(made: Made, name: str, weight: torch.Tensor, quantizes: Any, draw: Any) -> torch.Tensor:
    """The weight [N, K] that a layer has in the file."""
    if not quantizes(name):
        made.tensors[f"{name}.weight"] = weight.detach().contiguous().clone()
        return weight
    shape = (weight.shape[0], weight.shape[1])
    made.codes[name] = draw(name, shape, len(made.codes) + 1)
    return made.codes[name].dequantized()


def _experts(made: Made, path: str, module: Any, quantizes: Any, draw: Any) -> None:
    """transformers: [E, 2I, H] and [E, H, I]; gpt-oss and Llama 4 transposed, gpt-oss with gate and up in turns."""
    oai = hasattr(module, "gate_up_proj_bias")
    transposed = oai or "Llama4" in type(module).__name__
    for expert in range(module.down_proj.shape[0]):
        both, down = module.gate_up_proj[expert], module.down_proj[expert]
        rows = both.T if transposed else both
        gate, up = (rows[0::2], rows[1::2]) if oai else rows.chunk(2)
        gate = _layer(made, f"{path}.{expert}.gate_proj", gate, quantizes, draw)
        up = _layer(made, f"{path}.{expert}.up_proj", up, quantizes, draw)
        wide = _layer(made, f"{path}.{expert}.down_proj", down.T if transposed else down, quantizes, draw)
        joined = torch.stack([gate, up], 1).reshape(-1, gate.shape[1]) if oai else torch.cat([gate, up])
        both.copy_(joined.T if transposed else joined)
        down.copy_(wide.T if transposed else wide)
        if oai:
            biases = module.gate_up_proj_bias[expert]
            made.tensors[f"{path}.{expert}.gate_proj.bias"] = biases[0::2].clone()
            made.tensors[f"{path}.{expert}.up_proj.bias"] = biases[1::2].clone()
            made.tensors[f"{path}.{expert}.down_proj.bias"] = module.down_proj_bias[expert].clone()


def write_experts(
    folder: Path,
    made: Made,
    *,
    packed: bool = True,
    rename: Callable[[str], str] = str,
    inputs: Callable[[Codes | Fp8Codes], Any] | None = None,
    **more: Any,
) -> Path:
    """A folder in compressed-tensors' form, one group of targets for each kind of layer.

    Args:
        inputs: what a layer's group says of its activations.
    """
    tensors, groups = dict(made.tensors), {}
    for name, layer in made.codes.items():
        tensors |= layer.parts(name, packed)
        key = (json.dumps(layer.weights), None if inputs is None else json.dumps(inputs(layer)))
        one = group([], layer.weights, **({} if inputs is None else {"input_activations": inputs(layer)}))
        groups.setdefault(key, one)["targets"].append(rename(name))
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "config_groups": {f"group_{index}": one for index, one in enumerate(groups.values())},
    }
    return _write(folder, made, {rename(key): value for key, value in tensors.items()}, said | more)


def write_fp8_experts(folder: Path, made: Made, block: tuple[int, int]) -> Path:
    """A folder in DeepSeek's form: quant_method fp8, a weight_scale_inv per block."""
    tensors = dict(made.tensors)
    for name, layer in made.codes.items():
        assert isinstance(layer, Fp8Codes)
        tensors |= layer.parts(name, scale="weight_scale_inv")
    ignored = [
        name for name, module in made.model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in made.codes
    ]  # fmt: skip
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    routers = ["mlp.gate", "mlp.router"]
    return _write(folder, made, tensors, said | {"modules_to_not_convert": [*ignored, *routers]})


def _write(folder: Path, made: Made, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = made.model.config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")
    return folder
