"""Rotations of transformers' families, told apart by trying them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from halfbyte.lowering.rotations import known_rotations, rotation_form


@pytest.mark.parametrize(
    ("module", "whole", "partial"),
    [
        (modeling_llama, False, None),
        (modeling_cohere, True, None),
        (modeling_glm4_moe, False, False),
        (modeling_gpt_oss, False, None),
    ],
)
def test_the_forms_of_families(module: Any, whole: bool, partial: bool | None) -> None:
    """Pairs apart or side by side; heads that are turned in part where the family knows that."""
    found = {kind: form.interleaved for kind, form in known_rotations(module).items()}
    assert found == {False: whole} | ({} if partial is None else {True: partial})


def test_the_tables_hold_angles_in_several_ways() -> None:
    table = torch.arange(8.0)
    forms = [known_rotations(module)[False] for module in (modeling_llama, modeling_cohere, modeling_gpt_oss)]
    assert [form.angles(table).tolist() for form in forms] == [[0, 1, 2, 3], [0, 2, 4, 6], [*range(8)]]


def test_what_is_none_of_ours() -> None:
    """The wrong sign, another scale, a result in one piece."""

    def backwards(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin)

    def doubled(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, 2 * k, cos, sin)

    def joined(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return torch.cat([q, k], 1)

    for rotation in (backwards, doubled, joined):
        assert rotation_form(rotation, False) is None
    assert known_rotations(torch) == {}
