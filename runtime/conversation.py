"""A conversation: the caches of one text and the position reached in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.bundle import Bundle
from halfbyte.runtime.device_array import as_float32
from halfbyte.runtime.tokens import check_tokens


class Conversation:
    """Feeds tokens to a model that remembers what came before.

    Args:
        bundle: with the entry points ``decode`` and ``prefill`` and caches.
        chunk: tokens per call of ``prefill``, >= 2; a longer prompt takes several calls.

    Attributes:
        position: tokens fed so far.
        capacity: tokens it can hold.

    Raises:
        UsageError: the bundle cannot hold a conversation, or the chunk is too small.
    """

    def __init__(self, bundle: Bundle, *, chunk: int = 256) -> None:
        lacking = [name for name in ("prefill", "decode") if name not in bundle.entry_points]
        if lacking or bundle.manifest.model.max_context is None:
            raise UsageError(
                "this bundle holds no conversation",
                where=str(bundle.folder),
                found=f"entry points {', '.join(bundle.entry_points)}",
                accepted="a bundle compiled from a language model, with prefill, decode and max_context",
            )
        if chunk < 2:
            raise UsageError("chunk too small", found=str(chunk), accepted="at least 2 tokens")
        self._bundle, self._chunk = bundle, chunk
        self.capacity = bundle.manifest.model.max_context
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.position = 0
        self._caches = self._bundle.new_caches()

    def prefill(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Feeds tokens, in chunks.

        Args:
            tokens: at least one.

        Returns:
            f32 [vocabulary]: logits of the token after the last.

        Raises:
            UsageError: no tokens, tokens outside the vocabulary, or more than the context holds. Then nothing
                was fed.
            DeviceError: the device failed; the position is that of the last chunk that succeeded.
        """
        fed = self.check(tokens)
        logits: np.ndarray[Any, np.dtype[np.float32]] | None = None
        for start in range(0, len(fed), self._chunk):
            piece = fed[start : start + self._chunk]
            logits = self._call("prefill" if len(piece) > 1 else "decode", piece)
        assert logits is not None
        return logits

    def step(self, token: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Feeds one token and returns f32 [vocabulary]: logits of the next; errors as in `prefill`."""
        return self._call("decode", self.check([token]))

    def _call(
        self, name: str, tokens: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        position = np.array([self.position], np.int64)
        (logits,) = self._bundle.call(name, tokens, position, *self._caches)
        self.position += len(tokens)
        return as_float32(logits, self._bundle.entry_points[name].outputs[0].dtype)

    def check(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns tokens as i64 [T] if they can be fed now.

        Raises:
            UsageError: no tokens, tokens outside the vocabulary, or more than the context holds.
        """
        array = check_tokens(tokens, self._bundle.manifest.model.vocabulary)
        if self.position + len(array) > self.capacity:
            raise UsageError(
                "context full",
                found=f"{self.position} tokens held, {len(array)} more",
                accepted=f"{self.capacity} tokens in all",
                advice="start a new conversation, or compile with a larger --max-context",
            )
        return array
