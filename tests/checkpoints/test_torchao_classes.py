"""torchao's Int8Tensor, Int4Tensor and Float8Tensor made by hand: settings, shapes, what they ask of activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from made_checkpoints import DOWN_PROJ, float_tensors, llama_config
from safetensors.torch import save_file

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.ops.int8_roundings import int8_rounded
from halfbyte.passes.scheme import Activations, Zero

SHAPE = (64, 96)
DYNAMIC = {
    "_type": "QuantizeTensorToInt8Kwargs",
    "_data": {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}},
}
BFLOAT16, E4M3 = ({"_type": "torch.dtype", "_data": name} for name in ("bfloat16", "float8_e4m3fn"))


def opened(folder: Path, kind: str, parts: dict[str, np.ndarray], **said: Any) -> Checkpoint:
    tensors = {name: torch.from_numpy(value) for name, value in float_tensors(llama_config()).items()}
    del tensors[f"{DOWN_PROJ}.weight"]
    names = list(tensors)
    tensors |= {f"{DOWN_PROJ}._weight_{part}": _tensor(value) for part, value in parts.items()}
    about = {"_type": kind, "_data": said, "_tensor_data_names": list(parts)}
    metadata = {name: json.dumps({"_type": "Tensor"}) for name in names}
    metadata[f"{DOWN_PROJ}.weight"] = json.dumps(about)
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config() | {"quantization_config": {"quant_method": "torchao"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    return open_checkpoint(folder)


def _tensor(value: np.ndarray) -> torch.Tensor:
    for known, dtype in (
        (ml_dtypes.bfloat16, torch.bfloat16),
        (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    ):
        if value.dtype == known:
            bits = torch.from_numpy(np.array(value, order="C").view(f"u{value.dtype.itemsize}").copy())
            return bits.view(dtype)
    return torch.from_numpy(np.array(value, order="C"))


def weight_of(checkpoint: Checkpoint) -> np.ndarray:
    assert checkpoint.layers[DOWN_PROJ].scheme == checkpoint.quantized(DOWN_PROJ).scheme
    return checkpoint.quantized(DOWN_PROJ).dequantize().numpy()


def int8(whole: bool = False, zeros: bool = False) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(3)
    codes = random.integers(-128, 128, SHAPE).astype(np.int8)
    grid = (1, 1) if whole else (SHAPE[0], 1)
    scale = random.uniform(0.001, 0.01, grid).astype(np.float32)
    zero = random.integers(1, 9, grid).astype(np.int8) * np.int8(zeros)
    weight = (codes.astype(np.float32) - zero) * scale
    return {"qdata": codes, "scale": scale, "zero_point": zero}, weight


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_int8(tmp_path: Path, whole: bool, zeros: bool, dynamic: bool) -> None:
    parts, wanted = int8(whole, zeros)
    block = list(SHAPE) if whole else [1, SHAPE[1]]
    checkpoint = opened(
        tmp_path, "Int8Tensor", parts, block_size=block, act_quant_kwargs=DYNAMIC if dynamic else None
    )
    assert checkpoint.warnings == []
    info = checkpoint.layers[DOWN_PROJ]
    assert info.activations is (Activations.INT8_SYMMETRIC if dynamic else Activations.NONE)
    assert info.scheme is not None and (info.scheme.bits, info.scheme.channelwise) == (8, True)
    assert info.scheme.zero is (Zero.INTEGER if zeros else Zero.SYMMETRIC)
    np.testing.assert_array_equal(weight_of(checkpoint), wanted)


def test_int8_without_zero_points_and_dimensions(tmp_path: Path) -> None:
    parts, wanted = int8(whole=True)
    del parts["zero_point"]
    parts["scale"] = parts["scale"].reshape(())
    np.testing.assert_array_equal(
        weight_of(opened(tmp_path, "Int8Tensor", parts, block_size=list(SHAPE))), wanted
    )


@pytest.mark.parametrize(
    ("mapping", "settings", "activations"),
    [
        ("ASYMMETRIC", {}, Activations.INT8_AFFINE_F32),
        ("SYMMETRIC", {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}}, Activations.INT8_SYMMETRIC),
        ("SYMMETRIC", {"granularity": {"_type": "PerTensor", "_data": {}}}, Activations.INT8),
        ("SYMMETRIC", {"reduce_range": True}, Activations.INT8),
    ],
)
def test_how_int8_rounds_activations(
    tmp_path: Path, mapping: str, settings: dict[str, Any], activations: Activations
) -> None:
    asked = json.loads(json.dumps(DYNAMIC).replace("SYMMETRIC", mapping))
    asked["_data"] |= settings
    checkpoint = opened(tmp_path, "Int8Tensor", int8()[0], block_size=[1, SHAPE[1]], act_quant_kwargs=asked)
    assert checkpoint.layers[DOWN_PROJ].activations is activations and checkpoint.warnings == []


@pytest.mark.parametrize(("mapping", "zero"), [("SYMMETRIC", None), ("SYMMETRIC", 0), ("ASYMMETRIC", -9)])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_static_scales_give_the_codes_of_torchao(
    tmp_path: Path, mapping: str, zero: int | None, reduced: bool, dimensions: int
) -> None:
    """In float32 and, where the scale is float32 as torchao makes it, in bfloat16."""
    from torchao.quantization import Int8Tensor, PerTensor

    one = [1] * dimensions
    parts = int8()[0] | {"act_quant_scale": np.full(one, 0.037, np.float32)}
    parts |= {} if zero is None else {"act_quant_zero_point": np.full(one, zero, np.int8)}
    asked = json.loads(json.dumps(DYNAMIC).replace("SYMMETRIC", mapping))
    asked["_data"] |= {"granularity": {"_type": "PerTensor", "_data": {}}, "reduce_range": reduced}
    checkpoint = opened(tmp_path, "Int8Tensor", parts, block_size=[1, SHAPE[1]], act_quant_kwargs=asked)
    layer = checkpoint.layers[DOWN_PROJ]
    assert layer.activations is Activations.INT8_FIXED and checkpoint.warnings == []
    assert layer.fixed is not None
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn((3, 7, SHAPE[1])[-dimensions:]) * 2.5).to(dtype)
        codes, _, _ = int8_rounded(x, Activations.INT8_FIXED, layer.fixed.tensor())
        scale, point = torch.full(one, 0.037), torch.full(one, zero or 0, dtype=torch.int8)
        theirs = Int8Tensor.from_hp(x, PerTensor(), scale=scale, zero_point=point, reduce_range=reduced)
        assert torch.equal(codes, theirs.qdata)
        assert (codes.min(), codes.max()) == ((-64, 63) if reduced else (-128, 127))


def test_damaged_static_scales_are_named(tmp_path: Path) -> None:
    asked = json.loads(json.dumps(DYNAMIC))
    asked["_data"] |= {"granularity": {"_type": "PerTensor", "_data": {}}}
    parts = int8()[0] | {"act_quant_scale": np.array([[np.nan]], np.float32)}
    with pytest.raises(CheckpointError, match=f"{DOWN_PROJ}._weight_act_quant_scale"):
        opened(tmp_path, "Int8Tensor", parts, block_size=[1, SHAPE[1]], act_quant_kwargs=asked)


def test_what_int8_asks_and_does_not_get(tmp_path: Path) -> None:
    parts, _ = int8()
    static = parts | {"act_quant_scale": np.ones((1, 1), np.float32)}
    asymmetric = json.loads(json.dumps(DYNAMIC).replace("SYMMETRIC", "ASYMMETRIC"))
    checkpoint = opened(tmp_path, "Int8Tensor", static, block_size=[1, SHAPE[1]], act_quant_kwargs=asymmetric)
    texts = "\n".join(checkpoint.warnings)
    assert "static input scales" in texts and "symmetric" in texts
    weighed = parts | {"act_pre_scale": np.ones(SHAPE[1], np.float32)}
    with pytest.raises(CheckpointError, match="_weight_act_pre_scale"):
        opened(tmp_path / "awq", "Int8Tensor", weighed, block_size=[1, SHAPE[1]])


def int4(symmetric: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(4)
    codes = random.integers(-8, 8, SHAPE)
    scale = random.uniform(0.01, 0.1, (3, SHAPE[0])).astype(ml_dtypes.bfloat16)
    offset = (random.normal(0, 0.05, scale.shape) * (not symmetric)).astype(ml_dtypes.bfloat16)
    packed = (codes[:, 0::2] & 15 | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    wide = [np.repeat(part.astype(np.float64).T, 32, 1) for part in (scale, offset)]
    return {"qdata": packed, "scale": scale, "zero_point": offset}, codes * wide[0] + wide[1]


@pytest.mark.parametrize("asked", [None, BFLOAT16, E4M3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4(tmp_path: Path, symmetric: bool, asked: dict[str, Any] | None) -> None:
    parts, wanted = int4(symmetric)
    checkpoint = opened(tmp_path, "Int4Tensor", parts, block_size=[1, 32], activation_dtype=asked)
    info = checkpoint.layers[DOWN_PROJ]
    assert info.activations is (Activations.FP8 if asked is E4M3 else Activations.NONE)
    assert info.scheme is not None and (info.scheme.bits, info.scheme.group_size) == (4, 32)
    assert info.scheme.zero is (Zero.SYMMETRIC if symmetric else Zero.MINIMUM)
    np.testing.assert_allclose(weight_of(checkpoint), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_float8(tmp_path: Path, whole: bool, dynamic: bool) -> None:
    random = np.random.default_rng(5)
    codes = random.normal(0, 100, SHAPE).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = random.uniform(0.001, 0.01, (1, 1) if whole else (SHAPE[0], 1)).astype(np.float32)
    block = list(SHAPE) if whole else [1, SHAPE[1]]
    said = {"act_quant_kwargs": {"_type": "QuantizeTensorToFloat8Kwargs"}} if dynamic else {}
    checkpoint = opened(tmp_path, "Float8Tensor", {"qdata": codes, "scale": scale}, block_size=block, **said)
    assert checkpoint.warnings == []
    info = checkpoint.layers[DOWN_PROJ]
    assert info.activations is (Activations.FP8 if dynamic else Activations.NONE)
    np.testing.assert_array_equal(weight_of(checkpoint), codes.astype(np.float32) * scale)


@pytest.mark.parametrize(
    ("kind", "change", "said", "text"),
    [
        ("Int8Tensor", {}, {"block_size": [2, 96]}, "block_size is impossible"),
        ("Int8Tensor", {"scale": np.ones((64, 2), np.float32)}, {}, "_weight_scale does not fit"),
        ("Int8Tensor", {"qdata": np.ones((64, 48), np.int8)}, {}, "_weight_qdata does not fit"),
        ("Int8Tensor", {"zero_point": np.ones((3, 1), np.int8)}, {}, "_weight_zero_point does not fit"),
        ("Int8Tensor", {"scale": np.full((64, 1), np.nan, np.float32)}, {}, "no numbers"),
        ("Int4Tensor", {}, {"block_size": [64, 96]}, "block_size is impossible"),
        ("Int4Tensor", {"scale": np.ones((64, 3), np.float32)}, {}, "groups first"),
        ("Int4Tensor", {"qdata": np.ones((64, 96), np.int8)}, {}, "_weight_qdata does not fit"),
        ("Int4Tensor", {}, {"activation_dtype": "int8"}, "activation_dtype is impossible"),
        ("Int4Tensor", {"zero_point": None}, {}, "_weight_zero_point"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, kind: str, change: dict[str, Any], said: dict[str, Any], text: str
) -> None:
    parts, usual = (int8()[0], [1, 96]) if kind == "Int8Tensor" else (int4(False)[0], [1, 32])
    changed = {name: value for name, value in (parts | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=text) as error:
        opened(tmp_path, kind, changed, **({"block_size": usual} | said)).quantized(DOWN_PROJ)
    assert DOWN_PROJ in str(error.value)
