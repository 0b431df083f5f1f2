"""Malformed checkpoints are refused with a message that names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from independent_unpack import load_json

from halfbyte.checkpoints import open_checkpoint
from halfbyte.errors import CheckpointError

MALFORMED = [
    "bad-index-outside",
    "bad-missing-shard",
    "bad-qweight-shape",
    "bad-scale-missing",
    "bad-scale-nan",
    "bad-truncated-safetensors",
    "bad-bits-3",
    "bad-quant-method-unknown",
]


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for layer, info in checkpoint.layers.items():
        if info.scheme is not None:
            checkpoint.quantized(layer)


@pytest.mark.parametrize("name", MALFORMED)
def test_refused_by_name(data: Path, name: str) -> None:
    expected = load_json(data / name / "expected.json")
    assert expected["valid"] is False
    with pytest.raises(CheckpointError) as error:
        read_all(data / name)
    for text in expected["error_must_name"]:
        assert text in str(error.value)


@pytest.mark.parametrize("name", [name for name in MALFORMED if name != "bad-scale-nan"])
def test_refused_before_any_weight_is_read(data: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(data / name)
