"""torchao layers made by hand: widths, groups, activations, metadata that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_checkpoints import DOWN_PROJ, Q_PROJ, float_tensors, llama_config
from made_compressed_tensors import signed_layer
from safetensors.numpy import save_file

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Activations, Zero

PARTS = ("_weight_qdata", "_weight_scale", "_weight_zero_point")


def described(bits: int, group_size: int, activations: str | None = None, **changes: Any) -> dict[str, Any]:
    data = {
        "target_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"},
        "block_size": [1, group_size],
        "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        "activation_quantization": activations,
    }
    return {"_type": "IntxUnpackedToInt8Tensor", "_data": data | changes}


def opened(
    folder: Path,
    layer: str,
    parts: tuple[np.ndarray, ...],
    about: dict[str, Any] | str | None,
    config: dict[str, Any] | None = None,
) -> Checkpoint:
    """A llama with one such layer; `about` is what the metadata say of it, None for nothing."""
    config = config or llama_config()
    tensors = float_tensors(config)
    del tensors[f"{layer}.weight"]
    names = list(tensors)
    tensors |= {
        f"{layer}.{part}": value for part, value in zip(PARTS, parts, strict=True) if value is not None
    }
    metadata = {name: json.dumps({"_type": "Tensor"}) for name in names}
    if about is not None:
        metadata[f"{layer}.weight"] = about if isinstance(about, str) else json.dumps(about)
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"quantization_config": {"quant_method": "torchao", "quant_type": {}}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    return open_checkpoint(folder)


def made(shape: tuple[int, int], groups: int, bits: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, zeros, scales = signed_layer(shape, groups, bits=bits)
    return codes.astype(np.int8), scales, zeros.astype(np.int8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group_size", "groups"), [(4, 32, 3), (8, 32, 3), (4, 64, 2), (4, 96, 1), (8, 96, 1)]
)
def test_widths_and_groups(tmp_path: Path, bits: int, group_size: int, groups: int, symmetric: bool) -> None:
    codes, scales, zeros = made((64, 96), groups, bits)
    zeros = zeros * np.int8(not symmetric)
    checkpoint = opened(tmp_path, DOWN_PROJ, (codes, scales, zeros), described(bits, group_size))
    info, weight = checkpoint.layers[DOWN_PROJ], checkpoint.quantized(DOWN_PROJ)
    assert checkpoint.warnings == []
    assert info.scheme == weight.scheme
    assert info.scheme is not None
    assert (info.scheme.bits, info.scheme.group_size) == (bits, group_size)
    assert info.scheme.zero is (Zero.SYMMETRIC if symmetric else Zero.INTEGER)
    assert info.activations is Activations.NONE
    group = np.arange(96) // group_size
    wanted = (codes.astype(np.int32) - zeros[:, group]).astype(np.float32) * scales[:, group]
    np.testing.assert_array_equal(weight.dequantize().numpy(), wanted)


def test_activations_with_zero_points_are_those_of_torchao(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, Q_PROJ, made((64, 64), 2), described(4, 32, "int8_asym_per_token"))
    assert checkpoint.layers[Q_PROJ].activations is Activations.INT8_AFFINE
    assert checkpoint.warnings == []


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "NVFP4Tensor"])
def test_other_classes_are_refused_by_layer(tmp_path: Path, kind: str) -> None:
    checkpoint = opened(tmp_path, Q_PROJ, made((64, 64), 2), described(4, 32) | {"_type": kind})
    refusal = checkpoint.layers[Q_PROJ].refusal
    assert refusal is not None
    assert kind in refusal.found and "Int4Tensor" in refusal.accepted


def test_other_widths_are_refused_by_layer(tmp_path: Path) -> None:
    refusal = opened(tmp_path, Q_PROJ, made((64, 64), 2), described(3, 32)).layers[Q_PROJ].refusal
    assert refusal is not None
    assert (refusal.layer, refusal.found) == (Q_PROJ, "bits = 3")


@pytest.mark.parametrize(
    ("about", "text"),
    [
        (described(4, 48), "2 = ceil"),
        (described(4, 0), "block_size"),
        (described(4, 128), "block_size"),
        (described(4, 32, block_size=[2, 32]), "block_size"),
        (described(4, 32, block_size="x"), "block_size"),
        (described(4, 32, target_dtype="int4"), "target_dtype"),
        (described(4, 32, "int8_per_tensor"), "activation_quantization"),
        (described(4, 32, [1]), "activation_quantization"),
        ("{", "JSON"),
        ("[]", "object"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path: Path, about: dict[str, Any] | str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        opened(tmp_path, DOWN_PROJ, made((64, 96), 3), about)
    assert DOWN_PROJ in str(error.value)


def test_missing_metadata_are_named(tmp_path: Path) -> None:
    refusal = opened(tmp_path, Q_PROJ, made((64, 64), 2), None).layers[Q_PROJ].refusal
    assert refusal is not None
    assert "None" in refusal.found


@pytest.mark.parametrize("missing", range(3))
def test_missing_parts_are_named(tmp_path: Path, missing: int) -> None:
    parts: list[Any] = list(made((64, 64), 2))
    parts[missing] = None
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}.{PARTS[missing]}"):
        opened(tmp_path, Q_PROJ, tuple(parts), described(4, 32))


def test_codes_that_do_not_fit_their_bits(tmp_path: Path) -> None:
    codes, scales, zeros = made((64, 64), 2)
    codes[3, 5] = 8
    checkpoint = opened(tmp_path, Q_PROJ, (codes, scales, zeros), described(4, 32))
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}._weight_qdata"):
        checkpoint.quantized(Q_PROJ)


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    codes, scales, zeros = made((64, 64), 2)
    scales[0, 1] = np.nan
    checkpoint = opened(tmp_path, Q_PROJ, (codes, scales, zeros), described(4, 32))
    with pytest.raises(CheckpointError, match=f"{Q_PROJ}._weight_scale"):
        checkpoint.quantized(Q_PROJ)
