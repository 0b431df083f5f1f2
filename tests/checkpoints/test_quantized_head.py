"""Heads that are rounded when they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_checkpoints import (
    DOWN_PROJ,
    float_tensors,
    gptq_parts,
    llama_config,
    packed_folder,
    random_layer,
    write_folder,
)

from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.checkpoints.quantized_head import rounded, with_head
from halfbyte.errors import UsageError
from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32), (8, 24), (4, 200)])
def test_codes_are_the_nearest(bits: int, group: int) -> None:
    weight = np.random.default_rng(bits).normal(size=(5000, 100)).astype(np.float32)
    weight[7, :group] = 0
    made = rounded("head", torch.from_numpy(weight), bits, group)
    scale, codes, middle = made.scale.numpy(), made.codes.numpy().astype(np.float32), 1 << (bits - 1)
    assert made.shape == weight.shape and scale.shape == (5000, -(-100 // group))
    for number in range(scale.shape[1]):
        part = slice(number * group, min((number + 1) * group, 100))
        values, step = weight[:, part], scale[:, number : number + 1]
        extreme = np.take_along_axis(values, np.abs(values).argmax(1)[:, None], 1)
        want = np.abs(extreme) / np.float32(127) if bits == 8 else extreme / np.float32(-8)
        np.testing.assert_array_equal(step, want)
        error = np.abs((codes[:, part] - middle) * step - values)
        # Of 4 bits the value as large as the extreme, but of the other sign, is one step off.
        assert (error <= np.abs(step) * (0.501 if bits == 8 else 1.001)).all()
        assert (error > np.abs(step) * 0.501).mean() < 0.05
    assert (codes[7, :group] == middle).all() and (scale[7, 0] == 0)


@pytest.mark.parametrize("choice", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_alone_changes(tmp_path: Path, choice: str, tied: bool) -> None:
    config = llama_config(tie_word_embeddings=tied)
    tensors = float_tensors(config)
    if not tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    own = open_checkpoint(write_folder(tmp_path, config, tensors))
    assert with_head(own, "keep") is own
    checkpoint = with_head(own, choice)
    bits, group = (8, 64) if choice == "int8" else (4, 32)
    layer = checkpoint.layers["lm_head"]
    assert layer.scheme == WeightScheme(group, group == 64, Zero.SYMMETRIC, "f32", False, bits)
    assert choice in layer.reason
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].astype(np.float32)
    found = checkpoint.quantized("lm_head")
    assert isinstance(found, QuantTensor)
    assert np.abs(found.dequantize().numpy() - head).max() <= np.abs(head).max() / (125 if bits == 8 else 7)
    model, before = load_float_model(checkpoint), load_float_model(own)
    embedding = model.model.embed_tokens.weight
    assert torch.equal(embedding, before.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, found.dequantize())
    assert model.lm_head.weight is not embedding
    assert {name for name in checkpoint.layers if name != "lm_head"} == {*own.layers} - {"lm_head"}


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=False)
    parts = gptq_parts("lm_head", *random_layer((32, 64), 2)) | gptq_parts(
        DOWN_PROJ, *random_layer((64, 96), 3)
    )
    checkpoint = open_checkpoint(packed_folder(tmp_path, config, parts, lm_head=True))
    with pytest.raises(UsageError, match="quantized already"):
        with_head(checkpoint, "int8")
    with pytest.raises(UsageError, match="keep, int8, int4"):
        with_head(checkpoint, "int5")
