"""Feeding tokens: chunks, steps, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.errors import UsageError
from halfbyte.runtime import Bundle, Conversation, load

TOKENS = [3, 5, 7, 1, 10, 0, 2, 9, 8]


@pytest.fixture(scope="module")
def bundle(decoder_bundle: Path) -> Bundle:
    return load(decoder_bundle)


@pytest.mark.parametrize("chunk", [2, 3, 4, 8, 9, 256])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_chunks_do_not_matter(bundle: Bundle, reference: Any, chunk: int, count: int) -> None:
    """9 tokens in chunks of 2, 4 or 8 leave a single one, which decode takes."""
    conversation = Conversation(bundle, chunk=chunk)
    logits = conversation.prefill(TOKENS[:count])
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, reference.forward(TOKENS[:count])[-1])
    assert conversation.position == count


def test_steps_and_later_prompts_go_on(bundle: Bundle, reference: Any) -> None:
    conversation = Conversation(bundle)
    conversation.prefill(TOKENS[:3])
    np.testing.assert_array_equal(conversation.step(TOKENS[3]), reference.forward(TOKENS[:4])[-1])
    np.testing.assert_array_equal(conversation.prefill(TOKENS[4:]), reference.forward(TOKENS)[-1])
    conversation.reset()
    np.testing.assert_array_equal(conversation.prefill([4, 4]), reference.forward([4, 4])[-1])


def test_conversations_do_not_see_each_other(bundle: Bundle, reference: Any) -> None:
    one, two = Conversation(bundle), Conversation(bundle)
    one.prefill([1, 2, 3])
    two.prefill([9, 8])
    np.testing.assert_array_equal(one.step(4), reference.forward([1, 2, 3, 4])[-1])
    np.testing.assert_array_equal(two.step(7), reference.forward([9, 8, 7])[-1])


def test_full_contexts_are_refused_before_anything_is_fed(bundle: Bundle, reference: Any) -> None:
    conversation = Conversation(bundle, chunk=4)
    with pytest.raises(UsageError, match=r"context full(.|\n)*0 tokens held, 17 more(.|\n)*16 tokens in all"):
        conversation.prefill([1] * 17)
    assert conversation.position == 0
    conversation.prefill([1] * 15)
    np.testing.assert_array_equal(conversation.step(2), reference.forward([1] * 15 + [2])[-1])
    with pytest.raises(UsageError, match="context full"):
        conversation.step(1)
    assert conversation.position == 16


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([1, 11], r"outside the vocabulary(.|\n)*11(.|\n)*0 to 10"),
        ([-1], r"outside the vocabulary(.|\n)*-1"),
        ([1.5], r"no tokens(.|\n)*float64"),
        ([[1, 2]], r"no tokens(.|\n)*\[1, 2\]"),
    ],
)
def test_tokens_that_are_none_are_refused(bundle: Bundle, tokens: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Conversation(bundle).prefill(tokens)


def test_bundles_without_caches_hold_no_conversation(graph_bundle: Path, bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="holds no conversation"):
        Conversation(load(graph_bundle))
    with pytest.raises(UsageError, match="chunk too small"):
        Conversation(bundle, chunk=1)
