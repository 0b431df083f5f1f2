"""Token by token generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import UsageError
from halfbyte.runtime import Bundle, Conversation, generate, load
from halfbyte.runtime.logits import all_logits

PROMPT = [3, 5, 7]


@pytest.fixture(scope="module")
def bundle(decoder_bundle: Path) -> Bundle:
    return load(decoder_bundle)


def test_greedy_takes_the_most_likely(bundle: Bundle, reference: Any) -> None:
    generation = generate(bundle, PROMPT, max_tokens=6, stop_tokens=())
    assert list(generation) == reference.greedy(PROMPT, 6)
    assert generation.finish == "length"
    assert list(generation) == []


def test_sampling_draws_and_repeats(bundle: Bundle) -> None:
    def draw(seed: int) -> list[int]:
        return list(generate(bundle, PROMPT, max_tokens=12, temperature=300.0, seed=seed, stop_tokens=()))

    assert draw(1) == draw(1) != draw(2)
    assert len(set(draw(1))) > 1
    topmost = generate(bundle, PROMPT, max_tokens=6, temperature=300.0, top_k=1, stop_tokens=())
    assert list(topmost) == list(generate(bundle, PROMPT, max_tokens=6, stop_tokens=()))


def test_stop_tokens_end_the_text_and_are_not_part_of_it(bundle: Bundle, reference: Any) -> None:
    first, *_ = reference.greedy(PROMPT, 1)
    generation = generate(bundle, PROMPT, stop_tokens=[first])
    assert (list(generation), generation.finish) == ([], "stop")
    assert bundle.manifest.model.eos_token_ids == (2,)
    ends = set()
    for seed in range(20):  # the model's own stop token, 2, comes up by chance
        drawn = generate(bundle, [1], max_tokens=10, temperature=1e6, seed=seed)
        assert 2 not in list(drawn)
        ends.add(drawn.finish)
    assert ends == {"stop", "length"}


def test_full_context_ends_the_text(bundle: Bundle) -> None:
    generation = generate(bundle, [1] * 14, max_tokens=100, stop_tokens=())
    assert len(list(generation)) == 3  # positions 14 and 15, and one more that is not fed
    assert generation.finish == "context"
    generation = generate(bundle, [1] * 16, max_tokens=100, stop_tokens=())
    assert (len(list(generation)), generation.finish) == (1, "context")


def test_times_itself(bundle: Bundle) -> None:
    generation = generate(bundle, PROMPT, max_tokens=5, stop_tokens=())
    assert generation.timing.prompt_tokens == 0  # nothing happens before the first token is asked for
    list(generation)
    timing = generation.timing
    assert (timing.prompt_tokens, timing.decode_tokens) == (3, 4)
    assert timing.prompt_seconds > 0 and timing.decode_rate == pytest.approx(4 / timing.decode_seconds)
    assert str(timing).startswith("prompt: 3 tokens, ")


def test_goes_on_with_a_conversation(bundle: Bundle, reference: Any) -> None:
    conversation = Conversation(bundle)
    said = list(generate(bundle, PROMPT, max_tokens=2, stop_tokens=(), conversation=conversation))
    more = [said[-1], 4, 6]  # the last token has not been fed yet
    again = generate(bundle, more, max_tokens=2, stop_tokens=(), conversation=conversation)
    assert list(again) == reference.greedy(PROMPT + said + [4, 6], 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": []}, "no tokens"),
        ({"prompt_tokens": [1] * 17}, "context full"),
        ({"prompt_tokens": [99]}, "outside the vocabulary"),
        ({"prompt_tokens": [1], "max_tokens": -1}, "max-tokens out of range"),
        ({"prompt_tokens": [1], "top_p": 2.0}, "top-p out of range"),
    ],
)
def test_refuses_at_once(bundle: Bundle, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate(bundle, **arguments)


def test_no_tokens_asked_for(bundle: Bundle) -> None:
    assert list(generate(bundle, PROMPT, max_tokens=0)) == []


@pytest.mark.parametrize("tokens", [[4], [4, 1], list(range(11))])
def test_logits_of_every_position(bundle: Bundle, reference: Any, tokens: list[int]) -> None:
    found = all_logits(bundle, tokens)
    assert (found.dtype, found.shape) == (np.float32, (len(tokens), 11))
    np.testing.assert_array_equal(found, reference.forward(tokens))


def test_logits_of_what_cannot_be(bundle: Bundle, graph_bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"more tokens than the context holds(.|\n)*17(.|\n)*16"):
        all_logits(bundle, [1] * 17)
    with pytest.raises(UsageError, match="no entry point forward"):
        all_logits(load(graph_bundle), [1])
