"""Sampling against straightforward definitions of its distributions."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import DeviceError, UsageError
from halfbyte.runtime.sampling import Sampler, probabilities


def _slow(logits: np.ndarray[Any, Any], temperature: float, top_k: int, top_p: float) -> list[float]:
    """By the book: one token after another, most likely first, lower token first among equals."""
    powers = [np.exp((float(x) - float(logits.max())) / temperature) for x in logits]
    order = sorted(range(len(powers)), key=lambda token: (-float(logits[token]), token))
    if top_k:
        order = order[:top_k]
    mass = sum(powers[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if reached >= top_p:
            break
        kept.append(token)
        reached += powers[token] / mass
    total = sum(powers[token] for token in kept)
    return [powers[token] / total if token in kept else 0.0 for token in range(len(powers))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 40, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_distribution(temperature: float, top_k: int, top_p: float) -> None:
    random = np.random.default_rng(5)
    for _ in range(5):
        logits = random.normal(0, 2, 40).astype(np.float32)
        logits[random.integers(0, 40, 6)] = logits[3]  # ties
        logits[random.integers(0, 40)] = -np.inf
        found = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        np.testing.assert_allclose(found, _slow(logits, temperature, top_k, top_p), atol=1e-12)
        assert found.sum() == pytest.approx(1)


def test_top_k_takes_the_lower_of_equals() -> None:
    found = probabilities(np.array([1, 3, 3, 3], np.float32), temperature=1, top_k=2)
    assert found.tolist() == [0, 0.5, 0.5, 0]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = Sampler(temperature=1.0, seed=11)
    counts = np.bincount([sampler.sample(logits) for _ in range(8000)], minlength=4)
    np.testing.assert_allclose(counts / 8000, [0.5, 0.25, 0.125, 0.125], atol=0.02)


def test_never_draws_what_was_left_out() -> None:
    logits = np.array([5, 4, 3, -np.inf, 5], np.float32)
    sampler = Sampler(temperature=2.0, top_k=3, seed=0)
    assert {sampler.sample(logits) for _ in range(500)} == {0, 1, 4}
    sampler = Sampler(temperature=1.0, top_p=0.001, seed=0)
    assert {sampler.sample(logits) for _ in range(50)} == {0}


def test_seed_repeats_and_greedy_needs_none() -> None:
    logits = np.random.default_rng(2).normal(size=50).astype(np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(temperature=1.0, seed=seed)
        return [sampler.sample(logits) for _ in range(30)]

    assert draw(3) == draw(3) != draw(4)
    assert draw(None) != draw(None)
    # The stream itself, so that a seed means the same in every release.
    sampler = Sampler(temperature=1.0, seed=0)
    assert [sampler.sample(np.zeros(1000, np.float32)) for _ in range(4)] == [636, 269, 40, 16]
    greedy = Sampler(temperature=0, top_k=5, seed=1)
    assert {greedy.sample(logits) for _ in range(5)} == {int(np.argmax(logits))}
    assert greedy.sample(np.array([1, 7, 7, 0], np.float32)) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[1, np.nan, 2], [np.inf, 1], [-np.inf, -np.inf], [np.nan] * 3])
def test_logits_that_are_no_numbers(logits: list[float], temperature: float) -> None:
    with pytest.raises(DeviceError, match="not numbers"):
        Sampler(temperature=temperature).sample(np.array(logits, np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0}, "top-p"),
        ({"top_p": 1.1}, "top-p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"{message} out of range"):
        Sampler(**arguments)


def test_large_vocabularies_are_quick() -> None:
    logits = np.random.default_rng(2).normal(0, 3, 150_000).astype(np.float32)
    sampler = Sampler(temperature=0.8, top_k=50, top_p=0.9, seed=1)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        sampler.sample(logits)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02
