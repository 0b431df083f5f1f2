"""What compressed-tensors layers with e4m3 weights are, and what activations its layers ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import DOWN_PROJ, K_PROJ, Q_PROJ, llama_config
from made_compressed_tensors import (
    FP8,
    INT8,
    WEIGHTS,
    ct_folder,
    group,
    int_parts,
    packed_parts,
    signed_layer,
    spread,
)

from halfbyte.checkpoints import Checkpoint, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Activations
from halfbyte.passes.weight import Fp8Tensor


def fp8_parts(
    name: str, shape: tuple[int, int], grid: tuple[int, ...]
) -> tuple[dict[str, Any], torch.Tensor]:
    """A layer of e4m3 weights and a scale for each block, and the weights' own values."""
    random = np.random.default_rng(7)
    values = torch.from_numpy(random.normal(size=shape).astype(np.float32) * 20).to(torch.float8_e4m3fn)
    scales = random.uniform(0.01, 1, grid).astype(np.float32)
    return {f"{name}.weight": values, f"{name}.weight_scale": scales}, values.float()


@pytest.mark.parametrize(
    ("said", "grid", "block"),
    [
        ({"strategy": "tensor"}, (1,), (64, 96)),
        ({"strategy": "tensor"}, (), (64, 96)),
        ({"strategy": "channel"}, (64, 1), (1, 96)),
        ({"strategy": "group", "group_size": 32}, (64, 3), (1, 32)),
        ({"strategy": "block", "block_structure": [24, 40]}, (3, 3), (24, 40)),
        ({"strategy": "block", "block_structure": "128x128"}, (1, 1), (128, 128)),
    ],
)
def test_e4m3_strategies(
    tmp_path: Path, said: dict[str, Any], grid: tuple[int, ...], block: tuple[int, int]
) -> None:
    parts, values = fp8_parts(DOWN_PROJ, (64, 96), grid)
    one = group([DOWN_PROJ], {"num_bits": 8, "type": "float", "symmetric": True} | said)
    checkpoint = open_checkpoint(ct_folder(tmp_path, llama_config(), parts, [one], format="float-quantized"))
    assert checkpoint.warnings == []
    found = checkpoint.quantized(DOWN_PROJ)
    assert isinstance(found, Fp8Tensor)
    assert found.scheme == checkpoint.layers[DOWN_PROJ].scheme
    scales = parts[f"{DOWN_PROJ}.weight_scale"].reshape(-(-64 // block[0]), -(-96 // block[1]))
    np.testing.assert_array_equal(
        found.dequantize().numpy(), values.numpy() * spread(scales, (64, 96), block)
    )


def test_e4m3_weights_that_are_no_numbers(tmp_path: Path) -> None:
    parts, _ = fp8_parts(DOWN_PROJ, (64, 96), (64, 1))
    parts[f"{DOWN_PROJ}.weight"].view(torch.uint8)[3, 4] = 0xFF
    said = {"num_bits": 8, "type": "float", "strategy": "channel"}
    folder = ct_folder(tmp_path, llama_config(), parts, [group([DOWN_PROJ], said)])
    with pytest.raises(CheckpointError, match=f"{DOWN_PROJ}.weight") as error:
        open_checkpoint(folder).quantized(DOWN_PROJ)
    assert "1 NaN" in str(error.value)


def test_e4m3_blocks_that_no_kernel_has(tmp_path: Path) -> None:
    parts, values = fp8_parts(DOWN_PROJ, (64, 96), (2, 8))
    said = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 12]}
    checkpoint = open_checkpoint(ct_folder(tmp_path, llama_config(), parts, [group([DOWN_PROJ], said)]))
    refusal = checkpoint.layers[DOWN_PROJ].refusal
    assert refusal is not None and "12 inputs" in refusal.found
    scales = spread(parts[f"{DOWN_PROJ}.weight_scale"], (64, 96), (32, 12))
    np.testing.assert_array_equal(
        checkpoint.float_tensor(f"{DOWN_PROJ}.weight").numpy(), values.numpy() * scales
    )


def layer_asking(folder: Path, asked: dict[str, Any] | None, fp8: bool = False) -> Checkpoint:
    if fp8:
        parts, _ = fp8_parts(DOWN_PROJ, (64, 96), (4, 3))
        said = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}
    else:
        parts, said = packed_parts(DOWN_PROJ, *_symmetric((64, 96), 3)), WEIGHTS
    return open_checkpoint(
        ct_folder(folder, llama_config(), parts, [group([DOWN_PROJ], said, input_activations=asked)])
    )


def _symmetric(shape: tuple[int, int], groups: int) -> tuple[np.ndarray, None, np.ndarray]:
    codes, _, scales = signed_layer(shape, groups)
    return codes, None, scales


GROUPED = {"strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("asked", "fp8", "activations", "notes"),
    [
        (None, False, Activations.NONE, []),
        (INT8, False, Activations.INT8, []),
        (FP8, False, Activations.FP8, []),
        (INT8 | {"strategy": None}, False, Activations.INT8, []),
        (INT8 | {"symmetric": False}, False, Activations.INT8_AFFINE_F32, ["as torchao"]),
        (
            INT8 | {"symmetric": False, "strategy": "tensor"},
            False,
            Activations.INT8,
            ["per tensor", "zero points"],
        ),
        (INT8 | {"strategy": "channel", "dynamic": False}, False, Activations.INT8, ["static"]),
        (INT8 | {"strategy": "tensor"}, False, Activations.INT8, ["per tensor"]),
        (FP8 | {"strategy": "tensor", "dynamic": False}, False, Activations.FP8, ["static"]),
        (None, True, Activations.NONE, []),
        (FP8 | GROUPED, True, Activations.FP8, []),
        (FP8, True, Activations.FP8, ["per token"]),
        (FP8 | {"strategy": "tensor", "dynamic": False}, True, Activations.FP8, ["static"]),
    ],
)
def test_activations(
    tmp_path: Path, asked: dict[str, Any] | None, fp8: bool, activations: Activations, notes: list[str]
) -> None:
    checkpoint = layer_asking(tmp_path, asked, fp8)
    layer = checkpoint.layers[DOWN_PROJ]
    assert layer.scheme is not None and layer.refused_activations is None
    assert layer.activations is activations
    assert len(checkpoint.warnings) == len(notes)
    for warning, note in zip(checkpoint.warnings, notes, strict=True):
        assert note in warning and DOWN_PROJ in warning


@pytest.mark.parametrize(
    ("asked", "fp8"),
    [
        (INT8 | {"num_bits": 4}, False),
        (INT8 | {"strategy": "group", "group_size": 32}, False),
        (FP8 | {"dynamic": "local", "strategy": "tensor_group", "group_size": 16, "num_bits": 4}, False),
        (FP8 | {"strategy": "group", "group_size": 64}, True),
    ],
)
def test_activations_that_no_operator_computes(tmp_path: Path, asked: dict[str, Any], fp8: bool) -> None:
    layer = layer_asking(tmp_path, asked, fp8).layers[DOWN_PROJ]
    assert layer.scheme is not None and layer.activations is Activations.NONE
    assert layer.refused_activations is not None
    assert layer.refused_activations.layer == DOWN_PROJ and "activations" in layer.refused_activations.found


def test_mixed_schemes_in_one_file(tmp_path: Path) -> None:
    """Case 63: each group has its own width, storage, activations and format."""
    eight = signed_layer((32, 64), 1, bits=8)
    fp8, values = fp8_parts(DOWN_PROJ, (64, 96), (64, 1))
    parts = packed_parts(Q_PROJ, *_symmetric((64, 64), 2)) | int_parts(K_PROJ, eight[0], None, eight[2]) | fp8
    groups = [
        group(["re:.*q_proj"], format="pack-quantized"),
        group(
            [K_PROJ], WEIGHTS | {"num_bits": 8, "strategy": "channel", "group_size": None}, input_activations=INT8,
            format="int-quantized",
        ),
        group(
            ["re:.*down_proj$"], {"num_bits": 8, "type": "float", "strategy": "channel"}, input_activations=FP8,
            format="float-quantized",
        ),
    ]  # fmt: skip
    folder = ct_folder(tmp_path, llama_config(), parts, groups, format="mixed-precision")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "compressed-tensors mixed-precision"
    assert checkpoint.warnings == []
    found = {name: (str(layer.scheme), layer.activations.value) for name, layer in checkpoint.layers.items()}
    assert found[Q_PROJ] == ("int4 symmetric, group 32, f32 scales", "none")
    assert found[K_PROJ] == ("int8 symmetric, channelwise, f32 scales", "int8")
    assert found[DOWN_PROJ] == ("e4m3, blocks of 1x96, f32 scales", "fp8")
    np.testing.assert_array_equal(
        checkpoint.quantized(K_PROJ).dequantize().numpy(), eight[0].astype(np.float32) * eight[2]
    )
    np.testing.assert_array_equal(
        checkpoint.quantized(DOWN_PROJ).dequantize().numpy(),
        values.numpy() * fp8[f"{DOWN_PROJ}.weight_scale"],
    )
