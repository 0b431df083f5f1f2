"""Weights of e2m1 in groups, quantized and packed by hand: MXFP4 and NVFP4."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from made_experts import Made
from safetensors.torch import save_file

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


@dataclass(frozen=True)
class Fp4Codes:
    """Codes [N, K] of 0..15 and scales [N, G], as float64: exact."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantized(self) -> torch.Tensor:
        signs = np.where(self.codes >= 8, -1.0, 1.0)
        values = signs * _VALUES[self.codes & 7] * np.repeat(self.scales, self.size, 1)
        return torch.from_numpy(values.astype(np.float32))

    def octets(self) -> np.ndarray:
        """uint8 [N, K / 2], the even input in the low nibble."""
        return (self.codes[:, 0::2] | self.codes[:, 1::2] << 4).astype(np.uint8)

    def exponents(self) -> np.ndarray:
        """uint8 [N, G]: e8m0 bits of scales that are powers of two."""
        return (np.log2(self.scales) + 127).astype(np.uint8)


def random_mxfp4(name: str, shape: tuple[int, int], seed: int) -> Fp4Codes:
    """All codes; scales from 2^-9 to 2^-3."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, shape).astype(np.uint8)
    return Fp4Codes(codes, 2.0 ** random.integers(-9, -3, (shape[0], shape[1] // 32)))


def random_nvfp4(shape: tuple[int, int], seed: int) -> tuple[Fp4Codes, np.ndarray]:
    """All codes; e4m3 scales, which the file has beside a float for all: [N, K / 16]."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, shape).astype(np.uint8)
    scales = random.uniform(1, 448, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    return Fp4Codes(codes, scales.astype(np.float64)), scales


def write_mxfp4_experts(folder: Path, made: Made, **said: Any) -> Path:
    """As gpt-oss was published: experts stacked, gate's and up's outputs in turns, blocks and scales apart."""
    tensors = {name: value for name, value in made.tensors.items() if ".experts." not in name}
    blocks = sorted({name.rpartition(".experts.")[0] for name in made.codes})
    for block in blocks:
        path = f"{block}.experts"
        count = len([name for name in made.codes if name.startswith(path) and name.endswith("down_proj")])

        def of(expert: int, linear: str, path: str = path) -> Any:
            return made.codes[f"{path}.{expert}.{linear}"]

        def bias(expert: int, linear: str, path: str = path) -> torch.Tensor:
            return made.tensors[f"{path}.{expert}.{linear}.bias"]

        for part in ("blocks", "scales", "bias"):
            both, down = [], []
            for expert in range(count):
                if part == "bias":
                    gate, up, last = (
                        bias(expert, linear) for linear in ("gate_proj", "up_proj", "down_proj")
                    )
                else:
                    read = Fp4Codes.octets if part == "blocks" else Fp4Codes.exponents
                    parts = (read(of(expert, linear)) for linear in ("gate_proj", "up_proj", "down_proj"))
                    gate, up, last = (torch.from_numpy(np.ascontiguousarray(value)) for value in parts)
                both.append(torch.stack([gate, up], 1).flatten(0, 1))
                down.append(last)
            for stem, values in (("gate_up_proj", both), ("down_proj", down)):
                stacked = torch.stack(values)
                if part == "blocks":
                    stacked = stacked.unflatten(-1, (-1, 16))
                tensors[f"{path}.{stem}_{part}"] = stacked.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": names} | said
    config = made.model.config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder
