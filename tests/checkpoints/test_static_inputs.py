"""int8 layers whose inputs have a scale and zero point in the file: read, checked, and the codes of the tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from int8_twin import FIXED, fixed_parameters, rounded
from made_checkpoints import DOWN_PROJ, llama_config
from made_compressed_tensors import INT8, WEIGHTS, ct_folder, group, int_parts, packed_parts, signed_layer
from made_experts import made_model, quantize, write_experts
from safetensors.torch import load_file

from halfbyte.checkpoints import Checkpoint, build_model, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.passes.ops.int8_roundings import FixedRounding, int8_rounded
from halfbyte.passes.scheme import Activations

STATIC = INT8 | {"strategy": "tensor", "dynamic": False}
ASYMMETRIC = STATIC | {"symmetric": False}
SCALE, ZERO = f"{DOWN_PROJ}.input_scale", f"{DOWN_PROJ}.input_zero_point"
EIGHT = WEIGHTS | {"num_bits": 8, "strategy": "channel", "group_size": None}
SHAPE = (64, 96)


def folder_with(
    folder: Path, asked: dict[str, Any], inputs: dict[str, torch.Tensor | None], eight: bool = False
) -> Path:
    """A model whose down_proj asks for ``asked``, with the tensors ``inputs`` beside its weight."""
    codes, _, scales = signed_layer(SHAPE, 1 if eight else 3, bits=8 if eight else 4)
    parts: dict[str, Any] = (int_parts if eight else packed_parts)(DOWN_PROJ, codes, None, scales)
    parts |= {name: value for name, value in inputs.items() if value is not None}
    one = group([DOWN_PROJ], EIGHT if eight else WEIGHTS, input_activations=asked)
    return ct_folder(folder, llama_config(), parts, [one])


@pytest.mark.parametrize(
    ("asked", "scale", "zero", "eight", "found"),
    [
        (STATIC, torch.tensor([0.5]), None, False, FixedRounding(0.5)),
        (STATIC, torch.tensor(0.0625, dtype=torch.bfloat16), None, True, FixedRounding(0.0625)),
        (STATIC, torch.tensor([0.25]).half(), torch.zeros(1, dtype=torch.int8), True, FixedRounding(0.25)),
        (ASYMMETRIC, torch.tensor([3e-5]), torch.tensor([-128], dtype=torch.int8), False, None),
        (
            ASYMMETRIC,
            torch.tensor([7.0]),
            torch.tensor(127, dtype=torch.int32),
            True,
            FixedRounding(7.0, 127),
        ),
    ],
)
def test_one_scale_for_all_tokens(
    tmp_path: Path,
    asked: dict[str, Any],
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    eight: bool,
    found: FixedRounding | None,
) -> None:
    folder = folder_with(tmp_path, asked, {SCALE: scale, ZERO: zero}, eight)
    for glance in (False, True):
        checkpoint = open_checkpoint(folder, glance=glance)
        layer = checkpoint.layers[DOWN_PROJ]
        assert checkpoint.warnings == [] and layer.activations is Activations.INT8_FIXED
        assert layer.fixed == (found or FixedRounding(float(np.float32(3e-5)), -128))
        [x] = torch.randn(1, 9, SHAPE[1]) * layer.fixed.scale * 90
        codes, scales, zeros = int8_rounded(x, Activations.INT8_FIXED, layer.fixed.tensor())
        wanted = rounded(x.numpy(), FIXED, fixed_parameters(layer.fixed.scale, layer.fixed.zero))
        for got, want in zip((codes, scales, zeros), wanted, strict=True):
            np.testing.assert_array_equal(got.numpy(), want)


def test_zero_points_that_the_configuration_does_not_know_of_count(tmp_path: Path) -> None:
    inputs = {SCALE: torch.tensor([0.5]), ZERO: torch.tensor([3], dtype=torch.int8)}
    checkpoint = open_checkpoint(folder_with(tmp_path, STATIC, inputs))
    assert checkpoint.layers[DOWN_PROJ].fixed == FixedRounding(0.5, 3)
    [warning] = checkpoint.warnings
    assert "symmetric" in warning and DOWN_PROJ in warning


GOOD = {SCALE: torch.tensor([0.5]), ZERO: torch.tensor([3], dtype=torch.int8)}
WHOLE = "whole number from -128 to 127"


@pytest.mark.parametrize(
    ("damaged", "value", "words"),
    [
        (SCALE, None, "missing"),
        (SCALE, torch.tensor([0.5, 0.5]), "float32 [2]"),
        (SCALE, torch.ones(2, 1), "float32 [2, 1]"),
        (SCALE, torch.ones(0), "float32 [0]"),
        (SCALE, torch.ones(1, dtype=torch.int8), "int8 [1]"),
        (SCALE, torch.ones(1, dtype=torch.float64), "float64 [1]"),
        (SCALE, torch.tensor([0.0]), "above 0"),
        (SCALE, torch.tensor([-0.5]), "above 0"),
        (SCALE, torch.tensor([float("nan")]), "above 0"),
        (SCALE, torch.tensor([float("inf")]), "above 0"),
        (SCALE, torch.tensor([1e-40]), "above 0"),
        (SCALE, torch.tensor([3e38]), "above 0"),
        (ZERO, None, "missing"),
        (ZERO, torch.tensor([1, 2], dtype=torch.int8), "int8 [2]"),
        (ZERO, torch.tensor([0.5]), "float32 [1]"),
        (ZERO, torch.tensor([128], dtype=torch.int32), WHOLE),
        (ZERO, torch.tensor([-(2**40)]), WHOLE),
    ],
)
def test_damaged_tensors_are_named(
    tmp_path: Path, damaged: str, value: torch.Tensor | None, words: str
) -> None:
    folder = folder_with(tmp_path, ASYMMETRIC, {**GOOD, damaged: value})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert damaged in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    ("asked", "notes"),
    [
        (ASYMMETRIC, ["static input scales of experts", "activations of experts with zero points"]),
        (INT8 | {"symmetric": False}, ["activations of experts with zero points", "as torchao"]),
        (INT8, []),
    ],
)
def test_experts_round_per_token_and_symmetric(
    tmp_path: Path, asked: dict[str, Any], notes: list[str]
) -> None:
    made = made_model("mixtral")
    quantize(made, lambda name: "experts" in name or name.endswith("o_proj"))
    for name in made.codes:
        made.tensors |= {f"{name}.input_scale": torch.tensor([0.1])}
        made.tensors |= {f"{name}.input_zero_point": torch.tensor([5], dtype=torch.int8)}
    checkpoint = open_checkpoint(write_experts(tmp_path, made, inputs=lambda _: asked))
    found = {name: layer.activations for name, layer in checkpoint.layers.items() if layer.scheme is not None}
    dense = Activations.INT8_FIXED if not asked["dynamic"] else Activations.INT8_AFFINE_F32 if notes else None
    assert len(found) > 8
    for name, activations in found.items():
        assert activations is (Activations.INT8 if ".experts." in name else dense or Activations.INT8)
        assert (checkpoint.layers[name].fixed is None) == (activations is not Activations.INT8_FIXED)
    assert len(checkpoint.warnings) == len(notes)
    for note in notes:
        [warning] = [text for text in checkpoint.warnings if note in text]
        assert (".experts." in warning, "o_proj" in warning) == (
            (False, True) if "torchao" in note else (True, False)
        )
    build_model(checkpoint)


# ------------------------------------------------------------ compressed-tensors' own checkpoint


@pytest.fixture(scope="module")
def recorded(data: Path) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    folder = data / "llama-ct-static-int8"
    return open_checkpoint(folder), load_file(folder / "expected.safetensors")


def test_codes_are_those_of_the_tool(recorded: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    """Per token, a row of zeros has another zero point, whose codes stand for zeros too."""
    checkpoint, values = recorded
    kinds = []
    for name, layer in checkpoint.layers.items():
        if layer.scheme is None:
            continue
        kinds.append(layer.activations)
        fixed = None if layer.fixed is None else layer.fixed.tensor()
        x = values[f"linear:{name}:x"]
        codes, scale, zero = int8_rounded(x, layer.activations, fixed)
        known = torch.ones(len(x), dtype=torch.bool) if fixed is not None else (x != 0).any(-1)
        assert torch.equal(codes[known], values[f"linear:{name}:codes"][known])
        if fixed is None:
            assert torch.equal(scale[known], values[f"linear:{name}:scale"][known])
            assert torch.equal(zero[known], values[f"linear:{name}:zero"][known].float())
            assert not (~known).all() and torch.equal(
                codes[~known].float(), zero[~known, None].expand(1, len(x[0]))
            )
    assert kinds.count(Activations.INT8_FIXED) == 10 and kinds.count(Activations.INT8_AFFINE_F32) == 4


def test_layers_give_what_the_tool_gives(recorded: tuple[Checkpoint, dict[str, torch.Tensor]]) -> None:
    """To rounding in float32, which is in proportion to what zero points take off; rounded per token they would not."""
    checkpoint, values = recorded
    model, per_token = (
        build_model(checkpoint),
        build_model(checkpoint, activations=lambda _: Activations.INT8),
    )
    for name, layer in checkpoint.layers.items():
        if layer.scheme is None:
            continue
        x, want = values[f"linear:{name}:x"], values[f"linear:{name}:y"]
        sums = values[f"dequant:{name}"].sum(-1).abs().max()
        taken_off = (
            x.abs().max() * sums if layer.fixed is None else layer.fixed.scale * abs(layer.fixed.zero) * sums
        )
        largest = want.abs().amax(-1, keepdim=True)
        got, other = (
            made.get_submodule(name).fill(checkpoint.quantized(name))(x) for made in (model, per_token)
        )
        assert ((got - want).abs() <= 2e-6 * (largest + taken_off)).all(), name
        assert ((other - want).abs() > 1e-3 * largest).any(), name
