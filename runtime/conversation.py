"""A conversation: the caches of one text and the position reached in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.bundle import Bundle
from halfbyte.runtime.device_array import DeviceArray, as_float32
from halfbyte.runtime.manifest import SAMPLING
from halfbyte.runtime.sampling import Sampler, not_numbers
from halfbyte.runtime.tokens import check_tokens

# What a program draws tokens by where nobody looks at them.
_GREEDY = np.zeros(4, np.float32)


class Conversation:
    """Feeds tokens to a model that remembers what came before.

    Args:
        bundle: with the entry points ``decode`` and ``prefill`` and caches.
        chunk: tokens per call of ``prefill``, >= 2; a longer prompt takes several calls.

    Attributes:
        position: tokens fed so far.
        capacity: tokens it can hold.
        samples: whether the program draws tokens.

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
        self.samples = all(SAMPLING in bundle.entry_points[name].inputs for name in ("prefill", "decode"))
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
        return self._logits(self._feed(self.check(tokens), _GREEDY))

    def step(self, token: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Feeds one token and returns f32 [vocabulary]: logits of the next; errors as in `prefill`."""
        return self.prefill([token])

    def next_token(self, tokens: Sequence[int] | np.ndarray[Any, Any], sampler: Sampler) -> int:
        """Feeds tokens as `prefill` does, and draws the one after the last.

        A program compiled to sample draws it itself, with a random number of the sampler's, and the logits stay on
        the device; else the sampler draws it from them.

        Raises:
            UsageError, DeviceError: as `prefill` and `Sampler.sample`.
        """
        if not self.samples:
            return sampler.sample(self.prefill(tokens))
        token = int(self._feed(self.check(tokens), sampler.settings())[1].numpy()[0])
        if token < 0:
            raise not_numbers("NaN, inf, or nothing but -inf")
        return token

    def _feed(
        self, fed: np.ndarray[Any, np.dtype[np.int64]], settings: np.ndarray[Any, np.dtype[np.float32]]
    ) -> list[DeviceArray]:
        """The last call's outputs: logits, and the token if the program draws them."""
        outputs: list[DeviceArray] = []
        for start in range(0, len(fed), self._chunk):
            piece = fed[start : start + self._chunk]
            position, name = np.array([self.position], np.int64), "prefill" if len(piece) > 1 else "decode"
            rest = (settings, *self._caches) if self.samples else self._caches
            outputs = self._bundle.call_on_device(name, piece, position, *rest)
            self.position += len(piece)
        return outputs

    def _logits(self, outputs: list[DeviceArray]) -> np.ndarray[Any, np.dtype[np.float32]]:
        return as_float32(outputs[0].numpy(), self._bundle.entry_points["decode"].outputs[0].dtype)

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
