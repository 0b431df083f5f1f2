"""Generating text, token by token."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.bundle import Bundle
from halfbyte.runtime.conversation import Conversation
from halfbyte.runtime.sampling import Sampler


@dataclass
class Timing:
    """How long a generation took so far.

    Attributes:
        prompt_tokens: tokens of the prompt.
        prompt_seconds: time to the first new token.
        decode_tokens: calls of ``decode``, one per new token but the first.
        decode_seconds: time spent in them and in sampling, not in the caller's code.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second after the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def __str__(self) -> str:
        return (
            f"prompt: {self.prompt_tokens} tokens, {self.prompt_rate:.1f} tokens/s; "
            f"decode: {self.decode_tokens} tokens, {self.decode_rate:.1f} tokens/s"
        )


class Generation(Iterator[int]):
    """Iterates over new tokens; made by `generate`.

    Attributes:
        timing: of the tokens so far.
        finish: why it ended: ``stop`` (a stop token, which is not given out), ``length`` (max_tokens) or
            ``context`` (the caches are full); empty before the end.
        conversation: for going on afterwards. The last token given out has not been fed to it yet.
    """

    def __init__(
        self,
        conversation: Conversation,
        prompt: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        stop_tokens: frozenset[int],
    ) -> None:
        self.conversation, self.timing, self.finish = conversation, Timing(), ""
        self._prompt, self._left, self._sampler, self._stop = prompt, max_tokens, sampler, stop_tokens
        self._last: int | None = None

    def __next__(self) -> int:
        if not self.finish and self._left <= 0:
            self.finish = "length"
        if (
            not self.finish
            and self._last is not None
            and self.conversation.position >= self.conversation.capacity
        ):
            self.finish = "context"
        if self.finish:
            raise StopIteration
        token = self._first() if self._last is None else self._following(self._last)
        if token in self._stop:
            self.finish = "stop"
            raise StopIteration
        self._last = token
        self._left -= 1
        return token

    def _first(self) -> int:
        start = time.perf_counter()
        token = self.conversation.next_token(np.asarray(self._prompt), self._sampler)
        self.timing.prompt_tokens += len(self._prompt)
        self.timing.prompt_seconds += time.perf_counter() - start
        return token

    def _following(self, last: int) -> int:
        start = time.perf_counter()
        token = self.conversation.next_token([last], self._sampler)
        self.timing.decode_tokens += 1
        self.timing.decode_seconds += time.perf_counter() - start
        return token


def generate(
    bundle: Bundle,
    prompt_tokens: Sequence[int],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_tokens: Collection[int] | None = None,
    conversation: Conversation | None = None,
) -> Generation:
    """Returns an iterator over the tokens that follow a prompt; the work is done as it is asked for.

    Args:
        bundle: a language model with ``prefill`` and ``decode``.
        prompt_tokens: at least one.
        max_tokens: stop after so many new tokens.
        temperature, top_k, top_p, seed: see `Sampler`; temperature 0 is greedy.
        stop_tokens: tokens that end the text; None takes those of the model.
        conversation: goes on with this one instead of a new one.

    Raises:
        UsageError: an argument outside its range, or a prompt that is empty or leaves no room. While
            iterating, errors as in `Conversation.prefill` and `Sampler.sample`.
    """
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if max_tokens < 0:
        raise UsageError("max-tokens out of range", found=str(max_tokens), accepted=">= 0")
    held = Conversation(bundle) if conversation is None else conversation
    held.check(prompt_tokens)
    stop = bundle.manifest.model.eos_token_ids if stop_tokens is None else stop_tokens
    return Generation(held, list(prompt_tokens), max_tokens, sampler, frozenset(stop))
