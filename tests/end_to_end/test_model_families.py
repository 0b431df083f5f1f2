"""Families of models, made by hand: logits of transformers' own model, by forward and token by token.

All are read and run in torch. Those whose attention, caches or experts are of a form that no other has are exported,
too (with HALFBYTE_SLOW all are); some, that differ in what a compiler sees, are compiled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from compared_logits import check_float_models
from made_experts import made_model, quantize, write_experts
from model_families import DENSE, SPARSE
from slow import slow

import halfbyte
from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.lowering.decoder import cache_shapes, export_decoder
from halfbyte.runtime import Conversation
from halfbyte.runtime.logits import all_logits

TOKENS = [3, 9, 31, 0, 17, 8, 8, 40, 1, 2]
CONTEXT = 32
EXPORTED = (
    "mistral windowed",
    "phi",
    "gemma3_text",
    "olmo",
    "smollm3",
    "granite",
    "cohere",
    "stablelm",
    "ministral3",
    "vaultgemma",
    "minicpm3",
    "glm4_moe_lite",
    "exaone_moe",
    "flex_olmo",
)
COMPILED = ("gemma2", "cohere2", "phi3", "starcoder2")
# Whose layers are not all alike; of the others one is exported.
ALTERNATING = (
    "gemma2",
    "cohere2",
    "gemma3_text",
    "ministral",
    "qwen2 windowed",
    "olmo3",
    "smollm3",
    "exaone4",
    "vaultgemma",
    "granite_swa",
    *SPARSE,
)
Made = tuple[Path, np.ndarray]


def quantizes(name: str) -> bool:
    return "lm_head" not in name


def made_family(folder: Path, family: str) -> Made:
    """A folder, and the logits of what it stands for."""
    made = made_model(family, families=DENSE | SPARSE, num_hidden_layers=2 if family in ALTERNATING else 1)
    quantize(made, quantizes)
    return write_experts(folder, made), made.logits(TOKENS)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(got - want).max() <= 1e-5 * np.abs(want).max())


@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_float_models_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder, want = made_family(tmp_path / "model", family)
    check_float_models(folder, want, TOKENS)


@pytest.mark.parametrize(
    "family",
    [family if family in EXPORTED else pytest.param(family, marks=slow) for family in [*DENSE, *SPARSE]],
)
def test_the_exported_programs_compute_what_transformers_does(tmp_path: Path, family: str) -> None:
    folder, want = made_family(tmp_path / "model", family)
    model = load_float_model(open_checkpoint(folder))
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        programs = {name: one.module() for name, one in export_decoder(model, CONTEXT).items()}
        assert same(programs["forward"](tokens).numpy(), want)
        caches = [torch.zeros(cache.shape) for cache in cache_shapes(model, CONTEXT)]
        # In torch the operators leave the caches as they are: every call begins anew.
        start = torch.tensor([0])
        lasts = [programs["decode"](tokens[:1], start, *caches)]
        lasts += [programs["prefill"](tokens[:count], start, *caches) for count in (2, 6, len(TOKENS))]
    assert same(torch.stack(lasts).numpy(), want[[0, 1, 5, -1]])


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_programs_do_too(tmp_path: Path, portable: str, family: str) -> None:
    folder, want = made_family(tmp_path / "model", family)
    cpu = portable if family == "phi3" else "host"
    halfbyte.compile(folder, tmp_path / "out", halfbyte.CompileOptions(max_context=CONTEXT, cpu=cpu))
    bundle = halfbyte.load(tmp_path / "out")
    assert same(all_logits(bundle, TOKENS), want)
    conversation = Conversation(bundle)
    steps = [conversation.prefill(TOKENS[:4]), *(conversation.step(token) for token in TOKENS[4:])]
    assert same(np.stack(steps), want[3:])
