"""The logits of every position of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.bundle import Bundle
from halfbyte.runtime.conversation import Conversation
from halfbyte.runtime.device_array import as_float32
from halfbyte.runtime.tokens import check_tokens


def all_logits(bundle: Bundle, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns f32 [T, vocabulary]; row t holds the logits of what follows token t.

    Args:
        bundle: with the entry point ``forward``.
        tokens: at least one, at most the model's context.

    Raises:
        UsageError: no tokens, too many, tokens outside the vocabulary, or no such entry point.
        DeviceError: the device failed.
    """
    model = bundle.manifest.model
    numbers = check_tokens(tokens, model.vocabulary)
    if model.max_context is not None and len(numbers) > model.max_context:
        raise UsageError(
            "more tokens than the context holds", found=str(len(numbers)), accepted=str(model.max_context)
        )
    if len(numbers) == 1 and bundle.manifest.caches and "decode" in bundle.entry_points:
        # The program for one token: others may be compiled for two and more only.
        return Conversation(bundle).step(int(numbers[0]))[None]
    if "forward" not in bundle.entry_points:
        raise UsageError("the bundle has no entry point forward", found=", ".join(bundle.entry_points))
    (logits,) = bundle.call("forward", numbers)
    return as_float32(logits, bundle.entry_points["forward"].outputs[0].dtype)
