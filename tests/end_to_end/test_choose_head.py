"""Heads in float: rounded where that is measured to cost next to nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_checkpoints import (
    DOWN_PROJ,
    float_tensors,
    gptq_parts,
    llama_config,
    packed_folder,
    random_layer,
    write_folder,
)

import halfbyte
from halfbyte import head_cost
from halfbyte.checkpoints import Checkpoint, load_float_model, open_checkpoint
from halfbyte.checkpoints.quantized_head import with_head
from halfbyte.choose_head import MOST, SMALLEST, choose_head
from halfbyte.compile_phases import Watch
from halfbyte.divergence import divergence
from halfbyte.errors import UnsupportedLayerError
from halfbyte.float_inputs import run_float
from halfbyte.layer_activations import LayerActivations
from halfbyte.progress import Progress
from halfbyte.verify_model import verify

VOCABULARY = SMALLEST // 4 // 64
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(sharpness: float = 1.0, *, tied: bool = False, vocabulary: int = VOCABULARY) -> Path:
        config = llama_config(hidden_size=64, vocab_size=vocabulary, tie_word_embeddings=tied)
        tensors = float_tensors(config)
        if not tied:
            head = np.random.default_rng(5).normal(size=(vocabulary, 64)) * sharpness
            tensors["lm_head.weight"] = head.astype(np.float16)
        return write_folder(tmp_path_factory.mktemp("head"), config, tensors)

    return make


def chosen(folder: Path, **options: object) -> tuple[Checkpoint, dict[str, object]]:
    settings = halfbyte.CompileOptions(cache=False, **options)  # type: ignore[arg-type]
    activations = LayerActivations.of(vars(settings))
    return choose_head(open_checkpoint(folder), settings, activations, Watch(Progress()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_costs_little_is_rounded(made: Made, tied: bool) -> None:
    folder = made(0.02, tied=tied)
    checkpoint, said = chosen(folder)
    assert said["choice"] == "int8" and said["limit"] == MOST
    assert checkpoint.layers["lm_head"].scheme is not None
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 32)  # there is no tokenizer
    own = open_checkpoint(folder)
    logits = [
        run_float(load_float_model(one), one, tokens, [], Progress())[1]
        for one in (own, with_head(own, "int8"))
    ]
    want = divergence(*logits)
    assert 0 < want < MOST and said["kl"] == pytest.approx(
        want, rel=0.1
    )  # hidden states are in bfloat16 here


def test_a_head_that_costs_much_stays(made: Made) -> None:
    folder = made(3.0)
    checkpoint, said = chosen(folder)
    assert said["choice"] == "keep" and said["kl"] > MOST
    assert checkpoint.layers["lm_head"].scheme is None
    # Rounded inputs cost more than a rounded weight; e4m3 inputs do not go with 8-bit weights.
    assert chosen(folder, activations="int8")[1]["kl"] > said["kl"]
    assert chosen(folder, activations="fp8")[1] == {"choice": "keep"}


def test_only_large_heads_in_float_are_measured(made: Made, checkpoints: Path) -> None:
    assert chosen(made(vocabulary=VOCABULARY - 1))[1] == {"choice": "keep"}
    assert chosen(checkpoints / "llama-gguf-q4_1")[1] == {"choice": "keep"}
    plans = {plan.name: plan.plan for plan in halfbyte.inspect(made()).layers}
    assert plans["lm_head"].startswith("int8 if that is measured")
    assert plans["model.layers.0.mlp.up_proj"] == "float"
    assert chosen(made(), lm_head="keep")[1] == {"choice": "keep"}
    assert chosen(made(), lm_head="int4")[1] == {"choice": "int4"}


def test_the_cost_is_in_the_report_and_measured_once(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = made(0.02), halfbyte.CompileOptions(max_context=32)
    compiled = halfbyte.compile(folder, tmp_path / "out", options)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    head = report["head"]
    assert head["choice"] == "int8" and 0 < head["kl"] < MOST and report["options"]["lm_head"] == "auto"
    [row] = [row for row in report["layers"] if row["name"] == "lm_head"]
    assert row["mode"] == "W8A16" and f"costs KL {head['kl']:.1e}" in row["reason"]
    assert "head" in compiled.seconds
    found = verify(tmp_path / "out", folder)
    assert found.head_kl == pytest.approx(head["kl"], rel=0.1)
    assert [check.equal for check in found.layers if check.name == "lm_head"] == [True]

    def refuse(*_: object) -> float:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(head_cost, "_measured", refuse)
        assert halfbyte.compile(folder, tmp_path / "again", options).report["head"] == head
        (folder / "config.json").touch()
        with pytest.raises(AssertionError, match="measured again"):
            halfbyte.compile(folder, tmp_path / "again", options)


def test_what_is_broken_is_said_before_or_instead_of_a_measurement(
    made: Made, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(0.02)
    (folder / "tokenizer.json").write_text("{}")  # of no known kind
    assert chosen(folder)[1]["choice"] == "int8"  # measured on numbers
    foreign = checkpoints / "llama-gptq-v2-asym-g32" / "tokenizer.json"
    (folder / "tokenizer.json").write_text(foreign.read_text(encoding="utf-8"), encoding="utf-8")
    assert chosen(folder)[1]["choice"] == "int8"
    monkeypatch.setattr(head_cost, "_measured", lambda *_: float("nan"))
    checkpoint, said = chosen(folder)
    assert said == {"choice": "keep"} and "no numbers" in checkpoint.warnings[-1]


def test_refused_layers_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = llama_config(vocab_size=VOCABULARY)
    parts = gptq_parts(DOWN_PROJ, *random_layer((64, 96), 3, bits=8), bits=8)
    folder = packed_folder(tmp_path / "model", config, parts, bits=8)
    monkeypatch.setattr(head_cost, "_measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(UnsupportedLayerError, match="down_proj"):
        halfbyte.compile(folder, tmp_path / "out", halfbyte.CompileOptions(activations="fp8"))
    assert not (tmp_path / "out").exists()
