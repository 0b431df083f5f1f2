"""Tokens per second of a bundle, measured in the manner of llama-bench."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.bundle import Bundle
from halfbyte.runtime.conversation import Conversation


@dataclass(frozen=True)
class Test:
    """What is measured: a prompt of ``prompt`` tokens at once, or ``generated`` tokens one by one; the other is 0.

    Attributes:
        depth: tokens that the conversation holds before; they take no time.
    """

    prompt: int = 0
    generated: int = 0
    depth: int = 0

    def __str__(self) -> str:
        kind = f"pp{self.prompt}" if self.prompt else f"tg{self.generated}"
        return f"{kind} @ d{self.depth}" if self.depth else kind


@dataclass(frozen=True)
class Speed:
    """Tokens per second of every repetition of a test."""

    test: Test
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        """The standard deviation of the sample, 0 of one."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


def measure_speed(
    bundle: Bundle,
    tests: list[Test],
    *,
    repetitions: int = 5,
    chunk: int = 512,
    progress: Callable[[Test, int], None] = lambda test, repetition: None,
) -> Iterator[Speed]:
    """Runs the tests one after the other, each once more before it counts; tokens are drawn at random.

    Args:
        chunk: tokens per call of ``prefill``.
        progress: called before every repetition, 0 is the one that does not count.

    Raises:
        UsageError: a test holds no token or more than the context, or repetitions is not positive.
    """
    if repetitions < 1:
        raise UsageError("no repetitions", found=str(repetitions), accepted="at least 1")
    conversation = Conversation(bundle, chunk=chunk)
    for test in tests:
        tokens = test.depth + test.prompt + test.generated
        if not 0 < tokens <= conversation.capacity or tokens == test.depth:
            raise UsageError(
                "this test does not fit the context",
                found=f"{test}: {tokens} tokens",
                accepted=f"1 to {conversation.capacity} tokens in all",
                advice="measure fewer, or compile with a larger --max-context",
            )
    vocabulary, random = bundle.manifest.model.vocabulary or 1, np.random.default_rng(0)
    for test in tests:
        rates = []
        for repetition in range(repetitions + 1):
            progress(test, repetition)
            conversation.reset()
            fed = random.integers(0, vocabulary, test.depth + test.prompt + test.generated)
            if test.depth:
                conversation.prefill(fed[: test.depth])
            start = time.perf_counter()
            if test.prompt:
                conversation.prefill(fed[test.depth :])
            else:
                for token in fed[test.depth :]:
                    conversation.step(int(token))
            rates.append((test.prompt + test.generated) / (time.perf_counter() - start))
        yield Speed(test, tuple(rates[1:]))
