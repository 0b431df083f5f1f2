"""compressed-tensors, fp8 and w4afp8 layers made by hand, from signed codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_checkpoints import float_tensors, pack, write_folder
from safetensors.torch import save_file

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def signed_layer(
    shape: tuple[int, int], groups: int, seed: int = 1, bits: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes [N, K], zeros [N, G], both signed, and float32 scales [N, G], some negative."""
    random = np.random.default_rng(seed)
    middle = 2 ** (bits - 1)
    codes = random.integers(-middle, middle, shape)
    zeros = random.integers(-middle, middle, (shape[0], groups))
    scales = random.uniform(0.01, 0.2, zeros.shape) * random.choice([-1, 1], zeros.shape)
    return codes, zeros, scales.astype(np.float32)


def packed_parts(
    name: str, codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, bits: int = 4
) -> dict[str, np.ndarray]:
    """pack-quantized; zero points packed along N."""
    middle = 2 ** (bits - 1)
    parts = {
        "weight_packed": pack(codes + middle, bits),
        "weight_scale": scales,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if zeros is not None:
        parts["weight_zero_point"] = np.ascontiguousarray(pack(zeros.T + middle, bits).T)
    return {f"{name}.{part}": value for part, value in parts.items()}


def int_parts(
    name: str, codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray
) -> dict[str, np.ndarray]:
    """int-quantized; zero points as they are."""
    parts = {"weight": codes.astype(np.int8), "weight_scale": scales}
    if zeros is not None:
        parts["weight_zero_point"] = zeros.astype(np.int8)
    return {f"{name}.{part}": value for part, value in parts.items()}


def w4afp8_parts(name: str, codes: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
    """Two codes per byte, even inputs in the low nibbles."""
    octets = (codes[:, 0::2] & 15) | ((codes[:, 1::2] & 15) << 4)
    return {f"{name}.weight": octets.astype(np.uint8).view(np.int8), f"{name}.weight_scale_inv": scales}


def group(targets: list[str], weights: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"targets": targets, "weights": WEIGHTS if weights is None else weights} | more


def ct_folder(
    folder: Path,
    config: dict[str, Any],
    parts: dict[str, np.ndarray],
    groups: list[dict[str, Any]] | None = None,
    **quantization: Any,
) -> Path:
    """A folder whose layers in `parts` are quantized and whose others are float."""
    names = {key.rpartition(".")[0] for key in parts}
    every = [group([*sorted(names)])] if groups is None else groups
    said = {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{index}": one for index, one in enumerate(every)},
    }
    return quantized_folder(folder, config, parts, said | quantization)


def quantized_folder(
    folder: Path,
    config: dict[str, Any],
    parts: dict[str, Any],
    quantization: dict[str, Any],
) -> Path:
    """A folder whose layers in `parts` (arrays, or torch tensors of dtypes numpy lacks) replace float ones."""
    tensors = float_tensors(config)
    for name in {key.rpartition(".")[0] for key in parts}:
        tensors.pop(f"{name}.weight", None)
    write_folder(folder, config, tensors, quantization)
    made = {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        for name, value in (tensors | parts).items()
    }
    save_file(made, folder / "model.safetensors")
    return folder


def spread(values: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """[blocks of N, blocks of K] -> [N, K]."""
    return values[np.arange(shape[0])[:, None] // block[0], np.arange(shape[1])[None, :] // block[1]]
