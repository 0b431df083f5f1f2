"""The entry points of a decoder: a stateless forward, and prefill and decode over caches the caller owns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.lowering.decoder_attention import attending, modeling
from halfbyte.lowering.final_logits import final_logits
from halfbyte.lowering.real_rotations import real_rotations
from halfbyte.lowering.rotations import known_rotations
from halfbyte.passes.latent_heads import has_latent_heads
from halfbyte.passes.ops.attention_caches import key_cache_shape, value_cache_shape
from halfbyte.passes.ops.kv_append import KINDS


@dataclass(frozen=True)
class CacheShape:
    """A cache of one layer, of keys, values or latents, in the layout of `halfbyte.passes.ops.attention_caches`."""

    name: str
    shape: tuple[int, ...]


def cache_shapes(model: Any, max_context: int) -> list[CacheShape]:
    """The caches of a model in argument order: k0, v0, k1, v1, ..., or of latents: kv0, kv1, ..."""
    config = model.config
    heads = config.num_key_value_heads
    if has_latent_heads(model):
        width = config.kv_lora_rank + config.qk_rope_head_dim
        shape = value_cache_shape(1, max_context, width)
        return [CacheShape(f"kv{layer}", shape) for layer in range(config.num_hidden_layers)]
    if getattr(
        config, "kv_lora_rank", None
    ):  # latent attention, expanded: keys and values for every query head
        heads = config.num_attention_heads
        widths = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        widths = (width, width)
    return [
        CacheShape(f"{kind}{layer}", shape(heads, max_context, width))
        for layer in range(config.num_hidden_layers)
        for kind, shape, width in zip("kv", (key_cache_shape, value_cache_shape), widths, strict=True)
    ]


class Forward(torch.nn.Module):
    """tokens int64 [T] -> logits float32 [T, vocabulary]; keeps no state."""

    def __init__(self, model: Any, kind: str) -> None:
        super().__init__()
        self.kind = kind
        # The parts keep the model's own names for them, so parameters are called what the checkpoint calls them.
        self.config, self.model, self.lm_head = model.config, model.model, model.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[0])
        with attending(self.model, self.kind, torch.zeros(1, dtype=torch.int64)) as call:
            hidden = self.model(
                input_ids=tokens[None],
                attention_mask=call.masks,
                position_ids=places[None],
                use_cache=False,
            ).last_hidden_state
        return final_logits(self, hidden)


class Step(torch.nn.Module):
    """tokens int64 [T], position int64 [1] of the first, caches -> logits float32 [vocabulary] of the last token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = model.config, model.model, model.lm_head

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, *caches: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[0]) + position
        with attending(self.model, list(caches), position) as call:
            hidden = self.model(
                input_ids=tokens[None],
                attention_mask=call.masks,
                position_ids=places[None],
                cache=call,
                use_cache=True,
            ).last_hidden_state
        return final_logits(self, hidden[:, -1])


class SamplingStep(Step):
    """The same, and of those logits a token int64 [1], by ``sampling`` float32 [4] (``halfbyte::sample``)."""

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, position: torch.Tensor, sampling: torch.Tensor, *caches: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(tokens, position, *caches)
        return logits, torch.ops.halfbyte.sample(logits, sampling)


def export_decoder(
    model: Any, max_context: int, kind: str = "f32", samples: bool = False, traces: bool = False
) -> dict[str, torch.export.ExportedProgram]:
    """Exports ``forward``, ``prefill`` (any number of tokens from 2) and ``decode`` (one token).

    Args:
        model: a transformers causal language model; its weights may be empty, only shapes matter.
        max_context: positions of the caches.
        kind: dtype of the caches, ``f32``, ``f16`` or ``bf16``; `forward` rounds keys and values to it too.
        samples: prefill and decode draw a token too, and take ``sampling`` after the position.
        traces: the graphs tell of every node which line of Python made it.
    """
    shapes = cache_shapes(model, max_context)
    caches = tuple(torch.empty(cache.shape, dtype=KINDS[kind]) for cache in shapes)
    position = torch.zeros(1, dtype=torch.int64)
    given = (position, *[torch.zeros(4)] * samples)
    # Two is the least a symbolic length can be; one token has a program of its own, whose shapes are static.
    length = torch.export.Dim("T", min=2, max=max_context)
    some = torch.zeros(min(5, max_context), dtype=torch.int64)
    still: tuple[None, ...] = (None,) * len(caches)
    with torch.no_grad(), real_rotations(), _stack_traces(traces):
        known_rotations(modeling(model.model))  # tried on numbers now: there are none while a graph is traced
        step = SamplingStep(model) if samples else Step(model)
        programs = {
            "forward": torch.export.export(
                Forward(model, kind), (some,), dynamic_shapes={"tokens": {0: length}}, strict=False
            ),
            "prefill": torch.export.export(
                step,
                (some, *given, *caches),
                dynamic_shapes=({0: length}, *[None] * len(given), still),
                strict=False,
            ),
        }
        programs["decode"] = torch.export.export(step, (some[:1], *given, *caches), strict=False)
        return programs


@contextlib.contextmanager
def _stack_traces(wanted: bool) -> Iterator[None]:
    """While a model is exported: walking the stack for every node is a tenth of the time, and decides nothing."""
    config: Any = torch.fx.config
    before = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = not wanted
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
