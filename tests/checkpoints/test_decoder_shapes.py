"""The layers and parameters written down for plain models are those of the models that transformers builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import llama_config

from halfbyte.checkpoints.architecture import built_architecture
from halfbyte.checkpoints.decoder_shapes import _is_plain, architecture_of
from halfbyte.checkpoints.model_config import checked_config


def config(**changes: Any) -> dict[str, Any]:
    """Without the keys whose value is an ellipsis."""
    made = llama_config(**{"num_hidden_layers": 2} | changes)
    return checked_config({key: value for key, value in made.items() if value is not ...}, "config.json")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 24},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": ..., "num_hidden_layers": 12, "hidden_size": 96},
    ],
)
def test_the_same_layers_and_parameters_in_the_same_order(kind: str, changes: dict[str, Any]) -> None:
    chosen = config(model_type=kind, **changes)
    assert _is_plain(chosen)
    ours, theirs = architecture_of(chosen), built_architecture(chosen)
    assert ours == theirs
    assert list(ours.linears) == list(theirs.linears)
    assert list(ours.parameters) == list(theirs.parameters)


def test_a_head_size_that_follows_from_the_others() -> None:
    for kind in ("llama", "qwen2"):
        chosen = config(model_type=kind, head_dim=..., num_attention_heads=8)
        assert _is_plain(chosen)
        assert architecture_of(chosen) == built_architecture(chosen)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": ...},
        {"model_type": "qwen3", "head_dim": ...},
        {"tie_word_embeddings": None},
        {"attention_bias": 1},
        {"hidden_act": "gelu"},
    ],
)
def test_what_depends_on_defaults_is_built(changes: dict[str, Any]) -> None:
    assert not _is_plain(config(**changes))


def test_inspect_does_without_transformers(data: Path) -> None:
    """They take longer to import than everything else together."""
    code = "import sys, halfbyte; halfbyte.inspect(sys.argv[1]); print('transformers' in sys.modules)"
    for name in ("qwen3-gptq-dynamic", "llama-gguf-q4_1", "qwen2-awq-asym-g32"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(data / name)], capture_output=True, text=True, check=True
        )
        assert done.stdout == "False\n"
