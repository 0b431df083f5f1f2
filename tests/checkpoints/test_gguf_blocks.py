"""Blocks of GGUF tensors against worked bytes and against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from independent_unpack import gguf_weight
from made_gguf import random_blocks

from halfbyte.checkpoints.gguf_blocks import INTEGER, can_dequantize, float_rows, integer_rows
from halfbyte.passes.weight import QuantTensor

# x[i] = (i - 10) / 4, i = 0..31, as ggml quantizes it.
Q4_0 = "40b96c5b5b5b4a4a3a393928282817170606"
Q4_1 = "223800c180809191a2a2b3b3c4c4d5d5e6e6f7f7"
Q8_0 = "4b29c4cad0d6dce2e8eef4fa00060c12181e242a30363c43494f555b61676d73797f"


def rows(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)[None]


def test_the_worked_q4_0_block() -> None:
    blocks = integer_rows(rows(Q4_0), "q4_0")
    assert blocks.minimum is None
    assert blocks.scale.tolist() == [[-0.65625]]
    assert blocks.codes[0, :2].tolist() == [12, 11]
    assert blocks.codes[0, 16:18].tolist() == [6, 5]
    assert float_rows(rows(Q4_0), "q4_0", 2)[0, :2].tolist() == [-2.625, -1.96875]


def test_the_worked_q4_1_block() -> None:
    blocks = integer_rows(rows(Q4_1), "q4_1")
    assert blocks.minimum is not None
    assert blocks.minimum.tolist() == [[-2.5]]
    assert blocks.minimum.dtype == blocks.scale.dtype == torch.float16
    assert blocks.codes[0].tolist() == [n for n in range(16) for _ in range(2)]
    wanted = np.arange(32, dtype=np.float32) / 4 - 2.5
    assert np.abs(float_rows(rows(Q4_1), "q4_1", 3).numpy()[0] - wanted).max() <= 0.26


def test_the_worked_q8_0_block() -> None:
    values = float_rows(rows(Q8_0), "q8_0", 8)[0]
    assert values[10] == 0
    assert np.abs(values.numpy() - (np.arange(32) - 10) / 4).max() < 0.03


def test_the_worked_q4_k_block() -> None:
    """d = 1, dmin = 0.5, scales 1 2 3 4 37 38 39 40, minima 5 6 7 8 41 42 43 44, u[i] = (7i + 3) mod 16."""
    codes = [(7 * i + 3) % 16 for i in range(256)]
    packed = [codes[64 * c + i] | codes[64 * c + 32 + i] << 4 for c in range(4) for i in range(32)]
    block = rows("003c0038" + "818283848586878895a6b7c8" + bytes(packed).hex())
    blocks = integer_rows(block, "q4_k")
    assert blocks.minimum is not None
    assert blocks.scale.tolist() == [[1, 2, 3, 4, 37, 38, 39, 40]]
    assert blocks.minimum.tolist() == [[-2.5, -3, -3.5, -4, -20.5, -21, -21.5, -22]]
    assert blocks.codes[0].tolist() == codes
    assert float_rows(block, "q4_k", 12)[0, :4].tolist() == [0.5, 7.5, -1.5, 5.5]


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Also of zeros: -0.0 is not 0.0."""
    return bool((ours.view(np.uint32) == theirs.view(np.uint32)).all())


@pytest.mark.parametrize("kind", [kind.upper() for kind in INTEGER])
@pytest.mark.parametrize("outputs", [1, 3, 3000])  # 3000 rows are read in parts
def test_random_rows(kind: str, outputs: int) -> None:
    """Bit for bit what the gguf package computes in float32, whose only rounding is the last one."""
    number = GGMLQuantizationType[kind]
    inputs = 2 * GGML_QUANT_SIZES[number][0]
    raw = random_blocks(kind, outputs, inputs)
    found = float_rows(torch.from_numpy(raw), kind.lower(), number).numpy()
    assert same_bits(found, dequantize(raw, number))
    if outputs < 100:
        np.testing.assert_array_equal(found, gguf_weight(raw.tobytes(), kind, (outputs, inputs)))
        blocks = integer_rows(torch.from_numpy(raw), kind.lower())
        group, bits, levels = blocks.type.group, blocks.type.bits, blocks.type.levels
        parts = (blocks.codes, blocks.scale, group, None, blocks.minimum, None)
        weight = QuantTensor("x", *parts, bits, levels)
        assert weight.scheme == blocks.type.scheme(inputs)
        assert same_bits(weight.dequantize().numpy(), found)
        assert int(blocks.codes.max()) < 2**bits


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("size", [3e4, 1e-7])
def test_extreme_scales_stay_exact(kind: str, size: float) -> None:
    """float16's largest and its subnormal numbers, times the largest integers."""
    raw = random_blocks(kind, 4, 512, size=size)
    found = float_rows(torch.from_numpy(raw), kind.lower(), GGMLQuantizationType[kind]).numpy()
    assert np.isfinite(found).all()
    assert same_bits(found, dequantize(raw, GGMLQuantizationType[kind]))
    np.testing.assert_array_equal(found, gguf_weight(raw.tobytes(), kind, (4, 512)))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_float_types_keep_their_dtype(kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 5).to(dtype)
    found = float_rows(values.view(torch.uint8), kind.lower(), GGMLQuantizationType[kind])
    assert found.dtype == dtype
    assert torch.equal(found, values)


def test_what_the_package_can_dequantize() -> None:
    able = {kind.name for kind in GGMLQuantizationType if can_dequantize(kind.name.lower(), kind)}
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"} <= able
    assert not {"Q8_K", "I8"} & able
