"""Logits beside those of the model that a checkpoint stands for: a bundle's, and those of its float models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from halfbyte.checkpoints import load_float_model, open_checkpoint
from halfbyte.checkpoints.streamed_model import streamed_model
from halfbyte.runtime import Bundle, Conversation
from halfbyte.runtime.logits import all_logits


def check_logits(bundle: Bundle, logits: Callable[[list[int]], np.ndarray], tokens: list[int]) -> None:
    """Two prompts in a row, the second backwards; token by token from the fourth on."""
    for prompt in (tokens, tokens[::-1]):
        want, whole, conversation = logits(prompt), all_logits(bundle, prompt), Conversation(bundle)
        largest = np.abs(want).max()
        assert np.abs(whole - want).max() <= 1e-4 * largest
        steps = [conversation.prefill(prompt[:4]), *(conversation.step(token) for token in prompt[4:])]
        # Not to the bit: float layers, such as shared experts, are IREE's own code.
        assert np.abs(np.stack(steps) - whole[3:]).max() <= 1e-5 * largest


def check_float_models(folder: Path, want: np.ndarray, tokens: list[int]) -> None:
    """Nothing to warn of; the model held whole and the one held a layer at a time give the same bits."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == []
    text = torch.tensor([tokens])
    with torch.no_grad():
        own = load_float_model(checkpoint)(text).logits[0].numpy()
        streamed = streamed_model(checkpoint)(text).logits[0].numpy()
    assert np.array_equal(own, streamed) and np.abs(own - want).max() <= 1e-5 * np.abs(want).max()
