"""Choosing the next token from logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from halfbyte.errors import DeviceError, UsageError


def probabilities(
    logits: np.ndarray[Any, Any], *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the distribution tokens are drawn from.

    Temperature first, then top-k, then top-p over what is left. Of equal logits the lower token comes first.

    Args:
        logits: float [vocabulary]; -inf means never.
        temperature: > 0.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this much.

    Returns:
        f64 [vocabulary], sums to 1.

    Raises:
        DeviceError: the logits hold NaN or +inf, or nothing but -inf.
    """
    check(logits)
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    if 0 < top_k < len(weights):
        # Sorting a whole vocabulary can take as long as a decode: first leave out what cannot matter.
        candidates = np.flatnonzero(scaled >= np.partition(scaled, -top_k)[-top_k])
        weights = _only(weights, candidates[np.argsort(-scaled[candidates], kind="stable")[:top_k]])
    weights /= weights.sum()
    if top_p < 1:
        # All tokens less likely than this sum to less than 1 - top_p.
        candidates = np.flatnonzero(weights >= (1 - top_p) / len(weights))
        ordered = candidates[np.argsort(-scaled[candidates], kind="stable")]
        cumulated = np.cumsum(weights[ordered])
        weights = _only(weights, ordered[: int(np.searchsorted(cumulated, top_p, side="left")) + 1])
        weights /= weights.sum()
    return weights


def _only(
    weights: np.ndarray[Any, np.dtype[np.float64]], tokens: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    kept = np.zeros_like(weights)
    kept[tokens] = weights[tokens]
    return kept


def check(logits: np.ndarray[Any, Any]) -> None:
    """Refuses logits nothing can be chosen from.

    Raises:
        DeviceError: they hold NaN or +inf, or nothing but -inf.
    """
    top = logits.max(initial=-np.inf)  # NaN if there is one
    if not np.isfinite(top):
        raise not_numbers(str(top))


def not_numbers(found: str) -> DeviceError:
    """The error of logits that nothing can be chosen from."""
    return DeviceError(
        "the model's logits are not numbers",
        found=found,
        advice="halfbyte verify shows the first layer that goes wrong",
    )


class Sampler:
    """Draws tokens; the same seed and logits give the same tokens.

    Args:
        temperature: 0 always takes the most likely token, and top_k, top_p and seed do not matter.
        top_k: see `probabilities`.
        top_p: see `probabilities`.
        seed: of the random numbers; None draws one from the system.

    Raises:
        UsageError: an argument outside its range.
    """

    def __init__(
        self, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int | None = None
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise UsageError("temperature out of range", found=str(temperature), accepted=">= 0")
        if top_k < 0:
            raise UsageError("top-k out of range", found=str(top_k), accepted=">= 1, or 0 for all tokens")
        if not 0 < top_p <= 1:
            raise UsageError("top-p out of range", found=str(top_p), accepted="above 0, up to 1")
        if seed is not None and seed < 0:
            raise UsageError("seed out of range", found=str(seed), accepted=">= 0")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._random = np.random.Generator(np.random.PCG64(seed))

    def settings(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """What a program that draws the next token itself is given, f32 [4]: temperature, top_k, top_p, random number.

        Its distribution is that of `sample` but for roundings; its tokens are others for the same seed, except at
        temperature 0.
        """
        random = self._random.integers(2**24) / 2**24 if self.temperature else 0.0  # below 1 as f32 too
        return np.array([self.temperature, self.top_k, self.top_p, random], np.float32)

    def sample(self, logits: np.ndarray[Any, Any]) -> int:
        """Returns a token for logits, float [vocabulary].

        Raises:
            DeviceError: the logits hold NaN or +inf, or nothing but -inf.
        """
        if self.temperature == 0:
            check(logits)
            return int(np.argmax(logits))  # the first of equals
        weights = probabilities(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        # By hand, for Generator.choice promises no stable stream across versions of numpy.
        cumulated = np.cumsum(weights)
        token = int(np.searchsorted(cumulated, self._random.random() * cumulated[-1], side="right"))
        return min(token, int(np.flatnonzero(weights)[-1]))
