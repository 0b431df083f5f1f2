"""Unpackers that share nothing with the readers: numpy alone, bit by bit from the format descriptions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

_NUMPY = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1", "BF16": "<u2"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file; bfloat16 as float32."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    out = {}
    for name, entry in json.loads(blob[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(blob[first:last], _NUMPY[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            array = (array.astype("<u4") << 16).view("<f4")
        out[name] = array
    return out


def fields(word: int, bits: int) -> list[int]:
    """The values in a word of 32 bits, lowest first."""
    text = format(word % 2**32, "032b")
    return [int(text[32 - start - bits : 32 - start], 2) for start in range(0, 32, bits)]


def row_of_fields(words: np.ndarray, bits: int, added: int = 0) -> list[int]:
    return [value for word in words for value in fields(int(word) + added, bits)]


def gptq_layer(
    tensors: dict[str, np.ndarray], name: str, *, inputs: int, version: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """codes [N, K], zeros [N, G], scales [N, G], float32 weight [N, K], in the order of the inputs."""
    words, scales = tensors[f"{name}.qweight"], tensors[f"{name}.scales"].astype(np.float32)
    bits = 32 * words.shape[0] // inputs
    outputs, groups = words.shape[1], scales.shape[0]
    codes = np.array([row_of_fields(words[:, n], bits) for n in range(outputs)])
    added = sum(1 << start for start in range(0, 32, bits)) if version == 1 else 0
    zeros = np.array([row_of_fields(row, bits, added)[:outputs] for row in tensors[f"{name}.qzeros"]])
    g_idx = tensors.get(f"{name}.g_idx")
    weight = np.zeros((outputs, inputs), np.float32)
    for k in range(inputs):
        group = int(g_idx[k]) if g_idx is not None else (0 if groups == 1 else k // group_size)
        weight[:, k] = (codes[:, k] - zeros[group]).astype(np.float32) * scales[group]
    return codes, zeros.T, scales.T, weight


def awq_layer(
    tensors: dict[str, np.ndarray], name: str, *, outputs: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """As `gptq_layer`, of AWQ's gemm layout: nibble i of word c belongs to output 8c + [0 2 4 6 1 3 5 7][i]."""

    def columns(words: np.ndarray) -> np.ndarray:
        out = np.zeros((len(words), 8 * words.shape[1]), int)
        for row, column in np.ndindex(*words.shape):
            for place, value in zip(
                (0, 2, 4, 6, 1, 3, 5, 7), fields(int(words[row, column]), 4), strict=True
            ):
                out[row, 8 * column + place] = value
        return out[:, :outputs].T

    scales = tensors[f"{name}.scales"].astype(np.float32).T
    codes = columns(tensors[f"{name}.qweight"])
    qzeros = tensors.get(f"{name}.qzeros")
    zeros = np.full(scales.shape, 8) if qzeros is None else columns(qzeros)
    weight = np.zeros(codes.shape, np.float32)
    for k in range(codes.shape[1]):
        group = 0 if scales.shape[1] == 1 else k // group_size
        weight[:, k] = (codes[:, k] - zeros[:, group]).astype(np.float32) * scales[:, group]
    return codes, zeros, scales, weight


def gguf_weight(raw: bytes, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """float32 [N, K] of Q4_0, Q4_1 or Q8_0 rows, block by block."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    values: list[np.float32] = []
    for start in range(0, len(raw), size):
        block = raw[start : start + size]
        scale = np.float32(struct.unpack("<e", block[:2])[0])
        if kind == "Q8_0":
            values += [np.float32(q) * scale for q in struct.unpack("32b", block[2:])]
            continue
        body = block[2:] if kind == "Q4_0" else block[4:]
        codes = [octet & 15 for octet in body] + [octet >> 4 for octet in body]
        if kind == "Q4_0":
            values += [np.float32(u - 8) * scale for u in codes]
        else:
            minimum = np.float32(struct.unpack("<e", block[2:4])[0])
            values += [np.float32(u) * scale + minimum for u in codes]
    return np.array(values, np.float32).reshape(shape)


def rotary_back(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama q or k rows of a GGUF file in Hugging Face's order: neighbours of a head become its halves."""
    size = len(weight) // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                out[head * size + half * (size // 2) + pair] = weight[head * size + 2 * pair + half]
    return out


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
