"""The float model run layer by layer gives the logits and hidden states of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfbyte.checkpoints import load_float_model, open_checkpoint, streamed_model

TOKENS = [3, 99, 20, 7, 7, 21, 4, 50]


@pytest.mark.parametrize(
    "name", ["llama-gguf-q4_1", "qwen2-gptq-v1-actorder-g32", "mixtral-ct-w4a16-sharded", "deepseek-w4afp8"]
)
def test_a_streamed_model_is_the_whole_one(
    checkpoints: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: set[torch.nn.Module] = set()
    most: list[int] = []
    replace = streamed_model.replace_parameters

    def watched(module: torch.nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        replace(module, make)
        holds = any(not value.is_meta for value in module.parameters())
        if not isinstance(module, torch.nn.Embedding):  # whose memory is there, but not touched
            (filled.add if holds else filled.discard)(module)
        most.append(len(filled))

    monkeypatch.setattr(streamed_model, "replace_parameters", watched)
    checkpoint = open_checkpoint(checkpoints / name)
    model, ids = streamed_model.streamed_model(checkpoint), torch.tensor(TOKENS)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, load_float_model(checkpoint)(ids).logits)
        assert max(most) == 1 and not filled  # filled and dropped, one after the other
        want = load_float_model(checkpoint, torch.bfloat16).model(ids, use_cache=False).last_hidden_state[0]
    found = streamed_model.last_hidden(checkpoint, TOKENS)
    assert found.dtype == torch.float32 and torch.equal(found, want.float())
