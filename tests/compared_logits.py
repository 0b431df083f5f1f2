"""A bundle's logits beside those of the model that it was compiled from, whole and token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
