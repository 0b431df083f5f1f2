"""Tokens to try a model with: a sentence, or seeded numbers where there is no tokenizer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from halfbyte.errors import HalfbyteError

_TEXT = (
    "A weight that has been cut down to four bits still knows roughly where it was. The scale says how far apart "
    "sixteen marks stand, and the code says at which of them the weight came to rest."
)


def sample_tokens(folder: Path, has_tokenizer: bool, vocabulary: int, context: int) -> list[int]:
    """At most 64 tokens, and no more than fit the context with one to come.

    Numbers take the place of a sentence that a damaged or foreign tokenizer does not give tokens of the model for:
    whoever uses the tokenizer hears of that.

    Args:
        folder: where tokenizer.json is, if there is one.
        has_tokenizer: whether it is there.
        vocabulary: how many tokens the model knows.
        context: its positions.
    """
    from halfbyte.runtime.tokenizer import Tokenizer

    if has_tokenizer:
        with contextlib.suppress(HalfbyteError):
            found = list(Tokenizer(folder).encode(_TEXT))[: min(64, context - 1)]
            if len(found) >= 2 and all(token < vocabulary for token in found):
                return found
    return [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, min(32, context - 1))]
