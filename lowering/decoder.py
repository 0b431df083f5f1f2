"""The entry points of a decoder: a stateless forward, and prefill and decode over caches the caller owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.lowering.decode_attention import grouped_queries
from halfbyte.lowering.final_logits import final_logits
from halfbyte.lowering.real_rotations import real_rotations


@dataclass(frozen=True)
class CacheShape:
    """The key or value cache of one layer: [heads, positions, head width]."""

    name: str
    shape: tuple[int, int, int]


def cache_shapes(config: Any, max_context: int) -> list[CacheShape]:
    """The caches of a model in argument order: k0, v0, k1, v1, ..."""
    heads = config.num_key_value_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention keeps what keys and values are made from
        heads, widths = 1, {"k": config.kv_lora_rank, "v": config.qk_rope_head_dim}
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        widths = dict.fromkeys("kv", width)
    return [
        CacheShape(f"{kind}{layer}", (heads, max_context, widths[kind]))
        for layer in range(config.num_hidden_layers)
        for kind in "kv"
    ]


class _ArgumentCache:
    """What transformers' attention layers see of the caches: appends rows and gives the whole cache back."""

    def __init__(self, caches: list[torch.Tensor], position: torch.Tensor) -> None:
        self.caches, self.position = caches, position
        self.is_compileable = True

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = []
        for index, rows in ((2 * layer, keys), (2 * layer + 1, values)):
            written = torch.ops.halfbyte.cache_append(self.caches[index], rows[0], self.position)
            out.append(written.unsqueeze(0))
        return out[0], out[1]

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        return self.position  # Llama 4 scales queries by their positions

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self.caches[0].shape[1], 0


def _masks(
    config: Any, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """[1, 1, T, S]: which positions a query sees; by layer type for models whose layers differ."""
    eager = config._attn_implementation == "eager"  # then masks are added to scores

    def mask(seen: torch.Tensor) -> torch.Tensor:
        least = torch.finfo(config.dtype).min
        return torch.where(seen, 0.0, least).to(config.dtype)[None, None] if eager else seen[None, None]

    seen = positions[None, :] <= queries[:, None]
    window, chunk = (
        getattr(config, key, None) or 2**31 for key in ("sliding_window", "attention_chunk_size")
    )
    near = seen & (positions[None, :] > queries[:, None] - window)
    if not getattr(config, "layer_types", None):
        return mask(near)
    together = seen & (positions[None, :] // chunk == queries[:, None] // chunk)
    kinds = {"full_attention": seen, "sliding_attention": near, "chunked_attention": together}
    return {kind: mask(part) for kind, part in kinds.items()}


class Forward(torch.nn.Module):
    """tokens int64 [T] -> logits float32 [T, vocabulary]; keeps no state."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        # The parts keep the model's own names for them, so parameters are called what the checkpoint calls them.
        self.config, self.model, self.lm_head = model.config, model.model, model.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[0])
        hidden = self.model(
            input_ids=tokens[None],
            attention_mask=_masks(self.config, places, places),
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
        hidden = self.model(
            input_ids=tokens[None],
            attention_mask=_masks(self.config, places, torch.arange(caches[0].shape[1])),
            position_ids=places[None],
            cache=_ArgumentCache(list(caches), position),
            use_cache=True,
        ).last_hidden_state
        return final_logits(self, hidden[:, -1])


def export_decoder(
    model: Any, max_context: int, dtype: torch.dtype
) -> dict[str, torch.export.ExportedProgram]:
    """Exports ``forward``, ``prefill`` (any number of tokens from 2) and ``decode`` (one token).

    Args:
        model: a transformers causal language model; its weights may be empty, only shapes matter.
        max_context: positions of the caches.
        dtype: of the caches.
    """
    shapes = cache_shapes(model.config, max_context)
    caches = tuple(torch.empty(cache.shape, dtype=dtype) for cache in shapes)
    position = torch.zeros(1, dtype=torch.int64)
    # Two is the least a symbolic length can be; one token has a program of its own, whose shapes are static.
    length = torch.export.Dim("T", min=2, max=max_context)
    some = torch.zeros(min(5, max_context), dtype=torch.int64)
    still: tuple[None, ...] = (None,) * len(caches)
    with torch.no_grad(), real_rotations():
        step = Step(model)
        programs = {
            "forward": torch.export.export(
                Forward(model), (some,), dynamic_shapes={"tokens": {0: length}}, strict=False
            ),
            "prefill": torch.export.export(
                step, (some, position, *caches), dynamic_shapes=({0: length}, None, still), strict=False
            ),
        }
        with grouped_queries():
            programs["decode"] = torch.export.export(step, (some[:1], position, *caches), strict=False)
        return programs
