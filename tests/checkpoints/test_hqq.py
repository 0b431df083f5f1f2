"""HQQ layers made by hand: halves of bytes, fractional zero points, axes, settings that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_checkpoints import DOWN_PROJ, Q_PROJ, float_tensors, llama_config, write_folder

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Zero


def made(
    name: str,
    shape: tuple[int, int],
    group_size: int,
    axis: int = 1,
    bits: int = 4,
    changes: dict[str, Any] | None = None,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a layer, and its weight: exact in double precision, rounded once."""
    random = np.random.default_rng(7)
    groups = shape[0] * shape[1] // group_size
    rows, columns = (groups, group_size) if axis else (group_size, groups)
    codes = random.integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    scale = random.uniform(0.01, 0.1, (groups, 1) if axis else (1, groups)).astype(np.float16)
    zero = random.uniform(0, 2**bits, scale.shape).astype(np.float16)
    packed = codes if bits == 8 else codes[: rows // 2] << 4 | codes[rows // 2 :]
    settings = {"nbits": bits, "group_size": group_size, "axis": axis, "quant_zero": 0, "view_as_float": 0}
    parts = {"W_q": packed, "scale": scale, "zero": zero}
    parts |= {key: np.array(value, np.int32) for key, value in settings.items()}
    parts |= {"shape": np.array(shape, np.int64), "packing": np.frombuffer(b"4bit_u8", np.uint8)}
    weight = (codes - zero.astype(np.float64)) * scale.astype(np.float64)
    named = {
        f"{name}.{part}": value for part, value in (parts | (changes or {})).items() if value is not None
    }
    return named, weight.astype(np.float32).reshape(shape)


def opened(folder: Path, parts: dict[str, np.ndarray], **said: Any) -> Checkpoint:
    tensors = float_tensors(llama_config()) | parts
    for name in {key.removesuffix(".W_q") for key in parts if key.endswith(".W_q")}:
        del tensors[f"{name}.weight"]
    return open_checkpoint(write_folder(folder, llama_config(), tensors, said or None))


@pytest.mark.parametrize("said", [{}, {"quant_method": "hqq", "quant_config": {}}])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (4, 32), (4, 96), (8, 32)])
def test_groups_along_the_inputs(tmp_path: Path, bits: int, group_size: int, said: dict[str, Any]) -> None:
    parts, wanted = made(DOWN_PROJ, (64, 96), group_size, bits=bits)
    checkpoint = opened(tmp_path, parts, **said)
    info, weight = checkpoint.layers[DOWN_PROJ], checkpoint.quantized(DOWN_PROJ)
    assert checkpoint.warnings == []
    assert info.scheme == weight.scheme
    assert info.scheme is not None
    assert (info.scheme.bits, info.scheme.group_size, info.scheme.zero) == (bits, group_size, Zero.MINIMUM)
    np.testing.assert_array_equal(weight.dequantize().numpy(), wanted)


@pytest.mark.parametrize(
    ("group_size", "axis"),
    [(32, 0), (64, 0), (64, 1)],  # 64 does not divide K = 96: groups go on in the next row
)
def test_other_groups_are_refused_and_can_be_dequantized(tmp_path: Path, group_size: int, axis: int) -> None:
    parts, wanted = made(DOWN_PROJ, (64, 96), group_size, axis)
    checkpoint = opened(tmp_path, parts)
    refusal = checkpoint.layers[DOWN_PROJ].refusal
    assert refusal is not None
    assert f"axis {axis}, groups of {group_size} of 96" in refusal.found
    np.testing.assert_array_equal(checkpoint.float_tensor(f"{DOWN_PROJ}.weight").numpy(), wanted)


def test_other_widths_are_refused_by_layer(tmp_path: Path) -> None:
    parts, _ = made(Q_PROJ, (64, 64), 32, changes={"nbits": np.array(3, np.int32)})
    refusal = opened(tmp_path, parts).layers[Q_PROJ].refusal
    assert refusal is not None
    assert (refusal.layer, refusal.found) == (Q_PROJ, "bits = 3")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"scale": None}, "scale"),
        ({"nbits": None}, "nbits"),
        ({"nbits": np.zeros(2, np.int32)}, "nbits"),
        ({"axis": np.array(2)}, "group_size"),
        ({"group_size": np.array(0)}, "group_size"),
        ({"group_size": np.array(48)}, "group_size"),
        ({"quant_zero": np.array(1, np.uint8)}, "quant_zero"),
        ({"W_q": np.zeros((64, 31), np.uint8)}, "W_q"),
        ({"W_q": np.zeros((64, 32), np.int8)}, "W_q"),
        ({"zero": np.zeros((128, 2), np.float16)}, "zero"),
        ({"zero": np.zeros((128, 1), np.float32)}, "zero"),
        ({"shape": np.array([32, 128])}, "shape"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    parts, _ = made(Q_PROJ, (64, 64), 32, changes=changes)
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.{name}"):
        opened(tmp_path, parts)


def test_zero_points_that_are_no_numbers(tmp_path: Path) -> None:
    parts, _ = made(Q_PROJ, (64, 64), 32)
    parts[f"{Q_PROJ}.zero"][3, 0] = np.nan
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.zero"):
        opened(tmp_path, parts).quantized(Q_PROJ)
