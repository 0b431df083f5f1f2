"""compressed-tensors layers made by hand: storages, strategies, odd shapes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import DOWN_PROJ, Q_PROJ, gptq_parts, llama_config, packed_folder
from made_compressed_tensors import (
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
from halfbyte.passes.scheme import Zero
from halfbyte.passes.weight import QuantTensor

STORAGES = {"packed": packed_parts, "int8": int_parts}


def weights(**changes: Any) -> dict[str, Any]:
    return WEIGHTS | changes


def opened(
    folder: Path, parts: dict[str, Any], config: dict[str, Any] | None = None, **changes: Any
) -> Checkpoint:
    """A checkpoint whose only quantized layers are those of `parts`, in one group."""
    names = sorted({key.rpartition(".")[0] for key in parts})
    one = group(names, weights(**changes))
    return open_checkpoint(ct_folder(folder, config or llama_config(), parts, [one]))


def wanted(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, size: int) -> np.ndarray:
    at = np.arange(codes.shape[1]) // size
    zero = 0 if zeros is None else zeros[:, at]
    return (codes - zero).astype(np.float32) * scales.astype(np.float32)[:, at]


def dequantized(checkpoint: Checkpoint, layer: str) -> np.ndarray:
    return checkpoint.quantized(layer).dequantize().numpy()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_both_storages(tmp_path: Path, storage: str, symmetric: bool, bits: int) -> None:
    """Cases 7 and 8: the same numbers from words and from bytes; scales keep their sign."""
    codes, zeros, scales = signed_layer((64, 96), 3, bits=bits)
    zero = None if symmetric else zeros
    more = {"bits": bits} if storage == "packed" else {}
    parts = STORAGES[storage](DOWN_PROJ, codes, zero, scales, **more)
    checkpoint = opened(tmp_path, parts, num_bits=bits, symmetric=symmetric)
    assert checkpoint.warnings == []
    found = checkpoint.quantized(DOWN_PROJ)
    assert isinstance(found, QuantTensor)
    assert found.scheme == checkpoint.layers[DOWN_PROJ].scheme
    assert (found.bits, found.group_size) == (bits, 32)
    np.testing.assert_array_equal(found.codes.numpy().astype(int) - 2 ** (bits - 1), codes)
    np.testing.assert_array_equal(found.dequantize().numpy(), wanted(codes, zero, scales, 32))


def test_the_words_of_the_format_description(tmp_path: Path) -> None:
    codes = np.array([[(3 * n + 5 * k) % 16 - 8 for k in range(64)] for n in range(64)])
    scales = np.full((64, 2), 0.5, np.float32)
    parts = packed_parts(Q_PROJ, codes, None, scales)
    first = [int(word) & 0xFFFFFFFF for word in parts[f"{Q_PROJ}.weight_packed"][:8, 0]]
    assert [f"{word:08x}" for word in first[:3]] == ["3e94fa50", "61c72d83", "94fa50b6"]
    np.testing.assert_array_equal(dequantized(opened(tmp_path, parts), Q_PROJ)[0, :4], [-4.0, -1.5, 1.0, 3.5])


def test_the_same_weight_in_every_format(tmp_path: Path) -> None:
    """Case 66: GPTQ and both storages of compressed-tensors give one and the same weight."""
    codes, zeros, scales = signed_layer((64, 64), 2)
    half = scales.astype(np.float16)
    parts = gptq_parts(Q_PROJ, codes + 8, zeros + 8, half)
    gptq = open_checkpoint(packed_folder(tmp_path / "gptq", llama_config(), parts, dynamic={}))
    first = gptq.quantized(Q_PROJ)
    for storage, make in STORAGES.items():
        parts = make(Q_PROJ, codes, zeros, half)
        assert opened(tmp_path / storage, parts, symmetric=False).quantized(Q_PROJ).same_values(first)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "size"),
    [
        (96, 64, 64),  # case 29: a last group that is shorter
        (416, 64, 32),  # case 15: an odd number of groups
        (100, 64, 32),  # case 36: K fills neither words nor groups
        (132, 64, 128),  # case 34
        (96, 40, 32),  # case 32
        (96, 20, 32),
        (1024, 8, 16),
        (1024, 8, 256),
        (1024, 8, 512),
        (1024, 8, 1024),
    ],
)
def test_odd_shapes(tmp_path: Path, storage: str, inputs: int, outputs: int, size: int) -> None:
    config = llama_config(intermediate_size=inputs, hidden_size=outputs, head_dim=16)
    codes, zeros, scales = signed_layer((outputs, inputs), -(-inputs // size))
    parts = STORAGES[storage](DOWN_PROJ, codes, zeros, scales)
    if storage == "packed" and inputs % 8:  # whatever pads a row must not count
        words = parts[f"{DOWN_PROJ}.weight_packed"].view(np.uint32)
        words[:, -1] |= np.uint32(0xFFFFFFFF << (4 * (inputs % 8)) & 0xFFFFFFFF)
    checkpoint = opened(tmp_path, parts, config, group_size=size, symmetric=False)
    scheme = checkpoint.layers[DOWN_PROJ].scheme
    assert scheme is not None
    assert scheme.channelwise == (size == inputs)
    found = dequantized(checkpoint, DOWN_PROJ)
    np.testing.assert_array_equal(found, wanted(codes, zeros, scales, size))


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512, 1024, None])
def test_group_sizes(tmp_path: Path, size: int | None) -> None:
    """Case 37: codes 2, zero points 3, scales 0.5 make every weight -0.5."""
    config = llama_config(intermediate_size=2048)
    groups = 1 if size is None else 2048 // size
    codes, zeros = np.full((64, 2048), 2), np.full((64, groups), 3)
    parts = packed_parts(DOWN_PROJ, codes, zeros, np.full((64, groups), 0.5, np.float32))
    strategy = {"strategy": "channel", "group_size": None} if size is None else {"group_size": size}
    checkpoint = opened(tmp_path, parts, config, symmetric=False, **strategy)
    assert (dequantized(checkpoint, DOWN_PROJ) == -0.5).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("said", "stored", "block"),
    [
        ({"strategy": "tensor", "group_size": None}, (1,), (64, 96)),
        ({"strategy": "tensor", "group_size": None}, (), (64, 96)),
        ({"strategy": "channel", "group_size": -1}, (64, 1), (1, 96)),
        ({"strategy": None, "group_size": -1}, (64,), (1, 96)),
        ({"strategy": None, "group_size": 32}, (64, 3), (1, 32)),
        ({"strategy": "block", "group_size": None, "block_structure": [16, 32]}, (4, 3), (16, 32)),
        ({"strategy": "block", "group_size": None, "block_structure": "24x64"}, (3, 2), (24, 64)),
    ],
)
def test_strategies(
    tmp_path: Path, storage: str, said: dict[str, Any], stored: tuple[int, ...], block: tuple[int, int]
) -> None:
    codes, _, _ = signed_layer((64, 96), 1)
    grid = (-(-64 // block[0]), -(-96 // block[1]))
    scales = np.random.default_rng(3).uniform(0.01, 1, grid).astype(np.float32)
    parts = STORAGES[storage](DOWN_PROJ, codes, None, scales.reshape(stored))
    checkpoint = opened(tmp_path, parts, **said)
    assert checkpoint.warnings == []
    np.testing.assert_array_equal(
        dequantized(checkpoint, DOWN_PROJ), codes.astype(np.float32) * spread(scales, (64, 96), block)
    )


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_activation_order(tmp_path: Path, storage: str, actorder: object) -> None:
    codes, zeros, scales = signed_layer((64, 96), 3)
    order = np.random.default_rng(5).permutation(np.arange(96) // 32)
    parts = STORAGES[storage](DOWN_PROJ, codes, zeros, scales)
    parts[f"{DOWN_PROJ}.weight_g_idx"] = order.astype(np.int32)
    checkpoint = opened(tmp_path, parts, symmetric=False, actorder=actorder)
    assert checkpoint.warnings == []
    scheme = checkpoint.layers[DOWN_PROJ].scheme
    assert scheme is not None and scheme.act_order
    expected = (codes - zeros[:, order]).astype(np.float32) * scales[:, order]
    np.testing.assert_array_equal(dequantized(checkpoint, DOWN_PROJ), expected)
    found = checkpoint.permutation(DOWN_PROJ)
    np.testing.assert_array_equal(found, np.argsort(order, kind="stable"))


@pytest.mark.parametrize("actorder", ["static", "weight", False, None])
@pytest.mark.parametrize("index", [None, np.full(96, -1, np.int32), (np.arange(96) // 32).astype(np.int32)])
def test_orders_that_leave_inputs_where_they_are(
    tmp_path: Path, actorder: object, index: np.ndarray | None
) -> None:
    codes, _, scales = signed_layer((64, 96), 3)
    parts = packed_parts(DOWN_PROJ, codes, None, scales)
    if index is not None:
        parts[f"{DOWN_PROJ}.weight_g_idx"] = index
    checkpoint = opened(tmp_path, parts, actorder=actorder)
    assert checkpoint.permutation(DOWN_PROJ) is None and checkpoint.warnings == []
    np.testing.assert_array_equal(dequantized(checkpoint, DOWN_PROJ), wanted(codes, None, scales, 32))


def test_an_order_that_the_configuration_does_not_know_of(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 96), 3)
    parts = packed_parts(DOWN_PROJ, codes, None, scales)
    parts[f"{DOWN_PROJ}.weight_g_idx"] = (np.arange(96) % 3).astype(np.int32)
    checkpoint = opened(tmp_path, parts)
    assert checkpoint.permutation(DOWN_PROJ) is not None
    (warning,) = checkpoint.warnings
    assert "activation order" in warning and DOWN_PROJ in warning


def test_zero_points_of_the_other_storage(tmp_path: Path) -> None:
    """Case 14: words beside bytes and bytes beside words."""
    codes, zeros, scales = signed_layer((64, 96), 3)
    loose, tight = int_parts(DOWN_PROJ, codes, zeros, scales), packed_parts(DOWN_PROJ, codes, zeros, scales)
    key = f"{DOWN_PROJ}.weight_zero_point"
    for index, parts in enumerate((loose | {key: tight[key]}, tight | {key: loose[key]})):
        checkpoint = opened(tmp_path / str(index), parts, symmetric=False)
        np.testing.assert_array_equal(dequantized(checkpoint, DOWN_PROJ), wanted(codes, zeros, scales, 32))


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.uint8])
def test_zero_points_of_no_storage_name_both(tmp_path: Path, dtype: type) -> None:
    codes, zeros, scales = signed_layer((64, 96), 3)
    parts = packed_parts(DOWN_PROJ, codes, zeros, scales)
    parts[f"{DOWN_PROJ}.weight_zero_point"] = (zeros & 7).astype(dtype)
    with pytest.raises(CheckpointError, match="weight_zero_point") as error:
        opened(tmp_path, parts, symmetric=False)
    assert "int32 [8, 3]" in str(error.value) and "int8 [64, 3]" in str(error.value)


def test_zero_points_against_the_configuration(tmp_path: Path) -> None:
    """Case 76: zero points that are there count, whatever `symmetric` says; those that are missing are named."""
    codes, zeros, scales = signed_layer((64, 96), 3)
    checkpoint = opened(tmp_path / "a", int_parts(DOWN_PROJ, codes, zeros, scales), symmetric=True)
    (warning,) = checkpoint.warnings
    assert "symmetric = true" in warning and DOWN_PROJ in warning
    np.testing.assert_array_equal(dequantized(checkpoint, DOWN_PROJ), wanted(codes, zeros, scales, 32))
    neutral = int_parts(DOWN_PROJ, codes, np.zeros_like(zeros), scales)
    checkpoint = opened(tmp_path / "b", neutral, symmetric=False)
    scheme = checkpoint.layers[DOWN_PROJ].scheme
    assert scheme is not None and scheme.zero is Zero.SYMMETRIC and checkpoint.warnings == []
    with pytest.raises(CheckpointError, match=f"{DOWN_PROJ}.weight_zero_point is missing"):
        opened(tmp_path / "c", int_parts(DOWN_PROJ, codes, None, scales), symmetric=False)


def test_scales_of_16_bits_are_read_as_what_they_are(tmp_path: Path) -> None:
    """Case 19."""
    codes, _, scales = signed_layer((64, 96), 3)
    narrow = torch.from_numpy(scales).to(torch.bfloat16)
    parts: dict[str, Any] = packed_parts(DOWN_PROJ, codes, None, scales)
    parts[f"{DOWN_PROJ}.weight_scale"] = narrow
    found = opened(tmp_path, parts).quantized(DOWN_PROJ)
    assert found.scale.dtype == torch.bfloat16
    expected = wanted(codes, None, narrow.float().numpy(), 32)
    np.testing.assert_array_equal(found.dequantize().numpy(), expected)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_other_widths_are_refused_by_name(tmp_path: Path, storage: str, bits: int) -> None:
    """Case 9."""
    codes, _, scales = signed_layer((64, 96), 3)
    parts = STORAGES[storage](DOWN_PROJ, np.clip(codes, -1, 0), None, scales)
    if storage == "packed":
        parts[f"{DOWN_PROJ}.weight_packed"] = np.zeros((64, 3 * bits), np.int32)
    refusal = opened(tmp_path, parts, num_bits=bits).layers[DOWN_PROJ].refusal
    assert refusal is not None
    assert refusal.layer == DOWN_PROJ
    assert str(bits) in refusal.found and "4 or 8" in refusal.accepted


@pytest.mark.parametrize(
    "said", [{"type": "float", "num_bits": 8}, {"strategy": "token"}, {"strategy": "tensor_group"}]
)
def test_kinds_of_weights_that_are_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    codes, _, scales = signed_layer((64, 96), 3)
    layer = opened(tmp_path, packed_parts(DOWN_PROJ, codes, None, scales), **said).layers[DOWN_PROJ]
    assert layer.scheme is None and layer.refusal is not None
    assert layer.refusal.layer == DOWN_PROJ and "weights static" in layer.refusal.found


def test_a_group_size_that_kernels_lack_can_become_float(tmp_path: Path) -> None:
    codes, zeros, scales = signed_layer((64, 100), 5)
    parts = packed_parts(DOWN_PROJ, codes, zeros, scales)
    config = llama_config(intermediate_size=100)
    checkpoint = opened(tmp_path, parts, config, group_size=20, symmetric=False)
    refusal = checkpoint.layers[DOWN_PROJ].refusal
    assert refusal is not None and "20" in refusal.found
    np.testing.assert_array_equal(
        checkpoint.float_tensor(f"{DOWN_PROJ}.weight").numpy(), wanted(codes, zeros, scales, 20)
    )


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("weight_packed", np.zeros((64, 11), np.int32), r"\[64, 12\]"),
        ("weight_packed", np.zeros((63, 12), np.int32), r"\[64, 12\]"),
        ("weight_packed", np.zeros((64, 12), np.int64), r"int64(.|\n)*int32 \[64, 12\]"),
        ("weight_packed", np.zeros((64, 48), np.uint8), r"uint8(.|\n)*int32 \[64, 12\]"),
        ("weight_shape", np.array([64, 95]), r"\[64, 96\]"),
        ("weight_shape", np.array([64]), r"\[2\]"),
        ("weight_scale", np.zeros((64, 4), np.float32), r"\[64, 3\]"),
        ("weight_scale", np.zeros((64, 3), np.int8), r"\[64, 3\]"),
        ("weight_scale", np.zeros((3, 64), np.float32), r"\[64, 3\]"),
        ("weight_zero_point", np.zeros((7, 3), np.int32), r"\[8, 3\]"),
        ("weight_zero_point", np.zeros((64, 3, 1), np.int8), r"\[64, 3\]"),
        ("weight_g_idx", np.zeros(95, np.int32), r"\[96\]"),
        ("weight_g_idx", np.full(96, 3, np.int32), "3 to 3"),
        ("weight_g_idx", np.append(np.zeros(95), -1).astype(np.int32), "-1 to 0"),
        ("weight_g_idx", np.zeros(96, np.float32), r"\[96\]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, part: str, value: np.ndarray, text: str) -> None:
    parts = packed_parts(DOWN_PROJ, *signed_layer((64, 96), 3)) | {f"{DOWN_PROJ}.{part}": value}
    with pytest.raises(CheckpointError, match=text) as error:
        opened(tmp_path, parts, symmetric=False)
    assert f"{DOWN_PROJ}.{part}" in str(error.value)


def test_groups_are_never_guessed_from_the_number_of_scales(tmp_path: Path) -> None:
    """Case 24: 16 groups beside K = 512 and group_size 128."""
    codes, _, scales = signed_layer((64, 512), 16)
    with pytest.raises(CheckpointError, match=r"\[64, 4\]"):
        opened(
            tmp_path,
            packed_parts(DOWN_PROJ, codes, None, scales),
            llama_config(intermediate_size=512),
            group_size=128,
        )


def test_values_that_are_no_codes(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 96), 3)
    parts = int_parts(DOWN_PROJ, codes, None, scales)
    parts[f"{DOWN_PROJ}.weight"][5, 7] = 8
    with pytest.raises(CheckpointError, match=f"{DOWN_PROJ}.weight") as error:
        opened(tmp_path, parts).quantized(DOWN_PROJ)
    assert "-8 to 7" in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    codes, _, scales = signed_layer((64, 96), 3)
    scales[3, 1] = value
    with pytest.raises(CheckpointError, match=f"{DOWN_PROJ}.weight_scale"):
        opened(tmp_path, packed_parts(DOWN_PROJ, codes, None, scales)).quantized(DOWN_PROJ)


def test_a_float_weight_beside_a_packed_one(tmp_path: Path) -> None:
    codes, _, scales = signed_layer((64, 96), 3)
    parts = packed_parts(DOWN_PROJ, codes, None, scales)
    parts[f"{DOWN_PROJ}.weight"] = np.zeros((64, 96), np.float16)
    with pytest.raises(CheckpointError, match="nothing says which counts"):
        opened(tmp_path, parts)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("neutral", [True, False])
@pytest.mark.parametrize("outputs", [64, 8])
def test_a_glance_at_the_headers_tells_the_same(
    tmp_path: Path, storage: str, neutral: bool, outputs: int
) -> None:
    codes, zeros, scales = signed_layer((outputs, 96), 3)
    zeros = np.zeros_like(zeros) if neutral else zeros
    parts = STORAGES[storage](DOWN_PROJ, codes, zeros, scales)
    one = group([DOWN_PROJ], weights(symmetric=False))
    folder = ct_folder(tmp_path, llama_config(hidden_size=outputs), parts, [one])
    quick, whole = open_checkpoint(folder, glance=True), open_checkpoint(folder)
    assert quick.layers == whole.layers and quick.warnings == whole.warnings
    scheme = whole.layers[DOWN_PROJ].scheme
    assert scheme is not None and (scheme.zero is Zero.SYMMETRIC) == neutral
