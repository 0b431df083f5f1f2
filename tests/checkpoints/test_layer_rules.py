"""Rules that name layers, also with patterns from files that mean harm."""

from __future__ import annotations

import time

import pytest

from halfbyte.checkpoints.layer_rules import Match, Rule, first_fit
from halfbyte.errors import CheckpointError

LAYER = "model.layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    ("match", "text", "fits"),
    [
        (Match.EXACT, LAYER, True),
        (Match.EXACT, "model.layers.1.mlp", False),
        (Match.SUFFIX, "mlp.gate_proj", True),
        (Match.SUFFIX, "gate_proj", True),
        (Match.SUFFIX, "proj", False),
        (Match.PARTS, "mlp.gate_proj", True),
        (Match.PARTS, "layers.1", True),
        (Match.PARTS, "model.layers.1.", True),
        (Match.PARTS, "layers.1.mlp.gate", False),
        (Match.PARTS, "ayers.1", False),
        (Match.START, r".*gate", True),
        (Match.START, r"gate", False),
        (Match.START, r"model\.layers\.(1|2)\.", True),
        (Match.SEARCH, r"gate", True),
        (Match.SEARCH, r"^gate", False),
        (Match.PREFIX, LAYER, True),
        (Match.PREFIX, "model.layers.1", True),
        (Match.PREFIX, "model.layers", True),
        (Match.PREFIX, "model.layer", False),  # case 61: layers.1 is not layers.10
        (Match.PREFIX, "layers.1", False),
        (Match.CLASS, "Linear", True),
        (Match.CLASS, "linear", True),
        (Match.CLASS, "Embedding", False),
    ],
)
def test_fits(match: Match, text: str, fits: bool) -> None:
    assert Rule(match, text, {}, "config.json").fits(LAYER) == fits


def test_the_first_that_fits() -> None:
    rules = [Rule(Match.SEARCH, text, {}, "config.json") for text in ("up", "gate", "proj")]
    assert first_fit(rules, LAYER) is rules[1]
    assert first_fit(rules, "lm_head") is None


@pytest.mark.parametrize("text", ["(", "[a", "*", "a" * 3000, "(?P<a", "\\"])
def test_bad_patterns(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Rule(Match.START, text, {}, "config.json").fits(LAYER)


def test_a_pattern_that_would_run_for_ever_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot be used"):
        Rule(Match.START, r"(?:(?:.|.)+)+[A-Z]", {}, "config.json").fits(LAYER * 20)
    assert time.monotonic() - began < 5
