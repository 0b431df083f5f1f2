"""Masks that are causal, whatever they are made of; masks that only look so for a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfbyte

sdpa = torch.nn.functional.scaled_dot_product_attention
HEADS, WIDTH = 2, 16
Mask = Callable[[torch.Tensor], torch.Tensor]


def positions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(x.shape[1])
    return at[:, None], at[None, :]


def causal(x: torch.Tensor) -> torch.Tensor:
    i, j = positions(x)
    return j <= i


def added(x: torch.Tensor) -> torch.Tensor:
    """As models of before had it: the least float above the diagonal."""
    tokens = x.shape[1]
    least = torch.full((tokens, tokens), torch.finfo(torch.float32).min)
    return torch.triu(least, diagonal=1)[None, None]


def infinite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(causal(x), 0.0, -torch.inf)


def window(width: int) -> Mask:
    def mask(x: torch.Tensor) -> torch.Tensor:
        i, j = positions(x)
        return (j <= i) & (j > i - width)

    return mask


def chunks(width: int) -> Mask:
    def mask(x: torch.Tensor) -> torch.Tensor:
        i, j = positions(x)
        return (j <= i) & (i // width == j // width)

    return mask


def all_seen(x: torch.Tensor) -> torch.Tensor:
    i, j = positions(x)
    return (i >= 0) & (j >= 0)


def slopes(x: torch.Tensor) -> torch.Tensor:
    """ALiBi."""
    i, j = positions(x)
    return torch.where(j <= i, (j - i) * 0.5, -torch.inf)


def of_input(x: torch.Tensor) -> torch.Tensor:
    return causal(x) & (x[0, :, 0] < 100)[None, :]


class Attends(torch.nn.Module):
    def __init__(self, mask: Mask, held: int = 0) -> None:
        super().__init__()
        self.mask = mask
        if held:  # GPT-2's buffer
            self.register_buffer("held", torch.ones(held, held, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, columns] as queries, keys and values beside each other."""
        sides = [part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in x.chunk(3, -1)]
        tokens = x.shape[1]
        mask = self.held[:tokens, :tokens] if hasattr(self, "held") else self.mask(x)
        return sdpa(*sides, attn_mask=mask).transpose(1, 2).flatten(2)


def rewritten(module: torch.nn.Module, most: int | None = 200, tokens: int = 5) -> Any:
    size = torch.export.Dim("T", min=2, max=most)
    x = torch.randn(1, tokens, 3 * HEADS * WIDTH)
    return halfbyte.rewrite(module.eval(), (x,), dynamic_shapes=({1: size},))


def said(program: Any) -> str:
    [text] = program.report.attention.values()
    return str(text)


def check(module: torch.nn.Module, most: int | None = 200, lengths: tuple[int, ...] = (2, 17, 130)) -> None:
    program = rewritten(module, most)
    assert said(program) == "halfbyte::attention"
    names = {str(node.target) for node in program.entries["forward"].graph.nodes}
    assert not {"aten.scaled_dot_product_attention.default", "aten.arange.default"} & names
    for tokens in lengths:
        x = torch.randn(1, tokens, 3 * HEADS * WIDTH, generator=torch.Generator().manual_seed(tokens))
        torch.testing.assert_close(program.entries["forward"].module()(x), module(x), atol=3e-6, rtol=0)


@pytest.mark.parametrize("most", [200, None])
@pytest.mark.parametrize("mask", [causal, added, infinite, window(7), window(100)])
def test_causal_in_many_spellings(mask: Mask, most: int | None) -> None:
    check(Attends(mask), most)


def test_a_mask_that_is_held() -> None:
    check(Attends(causal, held=140), 139)


def test_one_number_of_tokens() -> None:
    module = Attends(window(3))
    x = torch.randn(1, 9, 3 * HEADS * WIDTH)
    program = halfbyte.rewrite(module.eval(), (x,))
    assert said(program) == "halfbyte::attention"
    torch.testing.assert_close(program.entries["forward"].module()(x), module(x), atol=3e-6, rtol=0)


def test_a_window_that_few_tokens_do_not_show() -> None:
    """None of 200 tokens sees less than all before it; of any number, some do."""
    check(Attends(window(201)), 200)
    check(Attends(window(500)), None, (2, 130, 520))


@pytest.mark.parametrize("mask", [chunks(40), chunks(150), all_seen, slopes])
@pytest.mark.parametrize("most", [200, None])
def test_other_masks_stay(mask: Mask, most: int | None) -> None:
    assert "it has a mask of its own; causal ones are accepted" in said(rewritten(Attends(mask), most))


def test_masks_of_inputs_stay() -> None:
    assert "its mask depends on the input x" in said(rewritten(Attends(of_input)))


def test_windows_too_wide_to_try() -> None:
    assert "its mask holds the number 10000" in said(rewritten(Attends(window(10000)), None))
    check(Attends(window(10000)), 200)


def test_models_of_transformers() -> None:
    """Their masks are made once for all layers, of packed sequences too."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=6, attn_implementation="sdpa",
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False).logits

    ids = torch.arange(20)[None]
    size = torch.export.Dim("T", min=2, max=64)
    program = halfbyte.rewrite(Logits(), (ids,), dynamic_shapes=({1: size},))
    assert [*program.report.attention.values()] == ["halfbyte::attention"] * 2
    windows = [
        node.args[7]
        for node in program.entries["forward"].graph.nodes
        if node.target is torch.ops.halfbyte.attention.default
    ]
    assert windows == [6, 6]
    with torch.no_grad():
        got, want = program.entries["forward"].module()(ids), Logits()(ids)
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)
