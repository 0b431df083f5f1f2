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


def _half(octets: bytes) -> float:
    return float(struct.unpack("<e", octets)[0])


def _bit(octets: bytes, place: int) -> int:
    return octets[place // 8] >> place % 8 & 1


def _six_bits(octets: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum number j of the 8 that Q4_K and Q5_K hold in 12 bytes."""
    if j < 4:
        return octets[j] & 63, octets[j + 4] & 63
    return (
        octets[j + 4] & 15 | octets[j - 4] >> 6 << 4,
        octets[j + 4] >> 4 | octets[j] >> 6 << 4,
    )


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _small_block(block: bytes, kind: str) -> list[tuple[int, float, float]]:
    scale, rest = _half(block[:2]), block[2:]
    minimum = 0.0
    if kind.endswith("_1"):
        minimum, rest = _half(rest[:2]), rest[2:]
    if kind == "Q8_0":
        return [(q, scale, 0.0) for q in struct.unpack("32b", rest)]
    high, rest = (rest[:4], rest[4:]) if kind.startswith("Q5") else (bytes(4), rest)
    codes = [octet & 15 for octet in rest] + [octet >> 4 for octet in rest]
    codes = [code + 16 * _bit(high, place) for place, code in enumerate(codes)]
    if kind == "IQ4_NL":
        codes = [_IQ4[code] for code in codes]
    offset = {"Q4_0": 8, "Q5_0": 16}.get(kind, 0)
    return [(code - offset, scale, minimum) for code in codes]


def _super_block(block: bytes, kind: str) -> list[tuple[int, float, float]]:
    """(code, scale, minimum) of 256 values; scales and minima are exact in double precision."""
    out = []
    for i in range(256):
        chunk, place = divmod(i, 64)
        half, in_half = divmod(i, 128)
        if kind == "Q4_K":
            octet = block[16 + 32 * chunk + place % 32]
            scale, minimum = _six_bits(block[4:16], i // 32)
            code = octet & 15 if place < 32 else octet >> 4
            out.append((code, _half(block[:2]) * scale, -_half(block[2:4]) * minimum))
        elif kind == "Q5_K":
            octet = block[48 + 32 * chunk + place % 32]
            scale, minimum = _six_bits(block[4:16], i // 32)
            code = (octet & 15 if place < 32 else octet >> 4) + 16 * (block[16 + i % 32] >> i // 32 & 1)
            out.append((code, _half(block[:2]) * scale, -_half(block[2:4]) * minimum))
        elif kind == "Q6_K":
            low = block[64 * half + in_half % 64]
            low = low & 15 if in_half < 64 else low >> 4
            high = block[128 + 32 * half + in_half % 32] >> 2 * (in_half // 32) & 3
            (scale,) = struct.unpack("b", block[192 + i // 16 : 193 + i // 16])
            out.append((low + 16 * high - 32, _half(block[208:]) * scale, 0.0))
        elif kind == "Q2_K":
            code = block[16 + 32 * half + in_half % 32] >> 2 * (in_half // 32) & 3
            both = block[i // 16]
            out.append((code, _half(block[80:82]) * (both & 15), -_half(block[82:84]) * (both >> 4)))
        elif kind == "Q3_K":
            low = block[32 + 32 * half + in_half % 32] >> 2 * (in_half // 32) & 3
            high = block[i % 32] >> i // 32 & 1
            group = i // 16
            scale = block[96 + group % 8] >> 4 * (group // 8) & 15
            scale += 16 * (block[104 + group % 4] >> 2 * (group // 4) & 3)
            out.append((low + 4 * high - 4, _half(block[108:]) * (scale - 32), 0.0))
        else:
            octet = block[8 + 16 * (i // 32) + i % 16]
            group = i // 32
            scale = block[4 + group // 2] >> 4 * (group % 2) & 15
            scale += 16 * (int.from_bytes(block[2:4], "little") >> 2 * group & 3)
            code = octet & 15 if i % 32 < 16 else octet >> 4
            out.append((_IQ4[code], _half(block[:2]) * (scale - 32), 0.0))
    return out


_SIZES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
_SUPER_SIZES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}


def gguf_weight(raw: bytes, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """float32 [N, K] of rows of blocks, value by value; the sum is exact in double precision and rounded once."""
    size = (_SIZES | _SUPER_SIZES)[kind]
    unpack = _small_block if kind in _SIZES else _super_block
    values = [part for at in range(0, len(raw), size) for part in unpack(raw[at : at + size], kind)]
    return (
        np.array([code * scale + minimum for code, scale, minimum in values])
        .astype(np.float32)
        .reshape(shape)
    )


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
