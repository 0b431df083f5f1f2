"""Programs that draw the next token themselves: the host's tokens when greedy, else their own by the seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import halfbyte
from halfbyte.runtime import Conversation, generate
from halfbyte.runtime.sampling import Sampler

MODEL = "base-gptq"
PROMPT = [3, 9, 31, 0, 17, 8]


def test_greedy_tokens_are_those_of_the_host_and_logits_stay(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, program = (halfbyte.load(compiled(MODEL, sample=where)) for where in ("host", "program"))
    assert not Conversation(host).samples and Conversation(program).samples
    want = list(generate(host, PROMPT, max_tokens=20, stop_tokens=()))
    for prompt in (PROMPT, PROMPT[:1]):
        logits = [Conversation(bundle).prefill(prompt) for bundle in (host, program)]
        assert np.array_equal(*logits)
    fetched: list[tuple[int, ...]] = []
    numpy = halfbyte.runtime.device_array.DeviceArray.numpy

    def counted(array: halfbyte.runtime.device_array.DeviceArray) -> np.ndarray:
        fetched.append(array.shape)
        return numpy(array)

    monkeypatch.setattr(halfbyte.runtime.device_array.DeviceArray, "numpy", counted)
    assert list(generate(program, PROMPT, max_tokens=20, stop_tokens=())) == want
    assert set(fetched) == {(1,)} and len(fetched) == 20


def test_a_seed_gives_the_same_tokens(compiled: Callable[..., Path]) -> None:
    program = halfbyte.load(compiled(MODEL, sample="program"))

    def drawn(**settings: float) -> list[int]:
        return list(generate(program, PROMPT, max_tokens=12, stop_tokens=(), **settings))  # type: ignore[arg-type]

    first = drawn(temperature=3.0, seed=1)
    assert first == drawn(temperature=3.0, seed=1) != drawn(temperature=3.0, seed=2)
    assert drawn(temperature=3.0, seed=5, top_k=1) == drawn() == drawn(temperature=3.0, seed=6, top_p=1e-6)
    top = set(np.argsort(-Conversation(program).prefill(PROMPT))[:3].tolist())
    for seed in range(20):
        assert Conversation(program).next_token(PROMPT, Sampler(temperature=9.0, top_k=3, seed=seed)) in top
