"""Unpackers that share nothing with the readers: numpy alone, bit by bit from the format descriptions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

_NUMPY = {
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I8": "i1",
    "U8": "u1",
    "BF16": "<u2",
    "F8_E4M3": "u1",
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file; bfloat16 as float32, e4m3 as its bits."""
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


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a model folder, from the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(folder / "model.safetensors")
    weight_map = load_json(index)["weight_map"]
    shards = {name: read_safetensors(folder / name) for name in set(weight_map.values())}
    return {name: shards[shard][name] for name, shard in weight_map.items()}


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


def ct_layer(
    tensors: dict[str, np.ndarray], name: str, *, shape: tuple[int, int], bits: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of compressed-tensors: signed codes [N, K], zeros [N, G], scales [N, G], float32 weight [N, K]."""
    outputs, inputs = shape
    middle = 2 ** (bits - 1)
    scales = tensors[f"{name}.weight_scale"].astype(np.float32)
    zeros = tensors.get(f"{name}.weight_zero_point", np.zeros(scales.shape, np.int8))
    if f"{name}.weight_packed" in tensors:
        words = tensors[f"{name}.weight_packed"]
        codes = np.array([row_of_fields(row, bits)[:inputs] for row in words]) - middle
    else:
        codes = tensors[f"{name}.weight"].astype(int)
    if zeros.dtype == np.dtype("<i4"):
        columns = [row_of_fields(column, bits)[:outputs] for column in zeros.T]
        zeros = np.array(columns).T - middle
    weight = np.zeros(shape, np.float32)
    for k in range(inputs):
        group = 0 if scales.shape[1] == 1 else k // group_size
        weight[:, k] = (codes[:, k] - zeros[:, group].astype(int)).astype(np.float32) * scales[:, group]
    return codes, zeros.astype(int), scales, weight


def e4m3(octet: int) -> float:
    """The value of an e4m3 (fn) number: a sign, four bits of exponent, three of mantissa."""
    text = format(octet, "08b")
    sign, exponent, mantissa = -1.0 if text[0] == "1" else 1.0, int(text[1:5], 2), int(text[5:], 2)
    if text[1:] == "1111111":
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8_weight(bits: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float32 [N, K] of e4m3 bits with a scale per block."""
    table = np.array([e4m3(octet) for octet in range(256)], np.float32)
    weight = np.zeros(bits.shape, np.float32)
    for n in range(bits.shape[0]):
        for k in range(bits.shape[1]):
            weight[n, k] = table[bits[n, k]] * scale[n // block[0], k // block[1]]
    return weight


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
