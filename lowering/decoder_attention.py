"""Attention of transformers' decoders by the halfbyte operators, over caches in their own layout."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte
from halfbyte.errors import UnsupportedLayerError
from halfbyte.lowering.latent_attention import latent_heads, unexpanded
from halfbyte.lowering.rotations import Form, known_rotations
from halfbyte.passes.latent_heads import LatentHeads

_NAME = "halfbyte"


class Attending:
    """The attention of one call of a model, as transformers' attention layers see it.

    It is their cache too, which hands on what is new: the caches are read and written by `attend` alone.

    Args:
        caches: k0, v0, k1, v1, ..., or a layer's one cache of latents; for a call that keeps nothing, what it rounds
            keys and values to.
        position: int64 [1], of the first token.
        config: of the model.

    Attributes:
        masks: what the model is to be called with. Nobody reads them: which one a layer is given says what it sees.
    """

    def __init__(self, caches: list[torch.Tensor] | str, position: torch.Tensor, config: Any) -> None:
        self._caches, self._position = caches, position
        window = getattr(config, "sliding_window", None) or 0
        chunk = getattr(config, "attention_chunk_size", None) or 0
        everything, near, together = (torch.ones(1, 1, 1, 1, dtype=torch.bool) for _ in range(3))
        self._bounds = {id(everything): (0, 0), id(near): (window, 0), id(together): (0, chunk)}
        kinds = {"full_attention": everything, "sliding_attention": near, "chunked_attention": together}
        self.masks = kinds if getattr(config, "layer_types", None) else near
        self._turned: dict[int, tuple[Any, ...]] = {}
        self.is_compileable = True

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        return self._position  # Llama 4 scales queries by their positions

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return 1, 0

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """An attention function of transformers: q, k, v are those of the new tokens, [1, heads, T, D]."""
        ops: Any = torch.ops.halfbyte
        if id(attention_mask) not in self._bounds:
            raise UnsupportedLayerError(
                "an attention layer makes a mask of its own",
                where=f"{type(module).__name__} {module.layer_idx}",
                found=str(getattr(attention_mask, "shape", attention_mask)),
                accepted="the mask that the model was called with",
            )
        window, chunk = self._bounds[id(attention_mask)]
        heads = latent_heads(module)
        if heads is not None:
            scale = float(query.shape[3] ** -0.5 if scaling is None else scaling)
            return self._over_latents(module, heads, query, key, (scale, window, softcap or 0.0, chunk)), None
        k, v = _by_token(key), _by_token(value)
        if isinstance(self._caches, str):
            keys, values = ops.blank_caches(k, v, self._caches)
        else:
            layer: Any = module.layer_idx
            keys, values = self._caches[2 * layer : 2 * layer + 2]
        turned = self._turned.get(id(key))
        if turned is not None and turned[0] is query:
            _, _, q, k, cos, sin, interleaved = turned
            q, keys, values = ops.rotate_append(
                _by_token(q), _by_token(k), v, cos, sin, interleaved, keys, values, self._position
            )
        else:
            q = _by_token(query)
            keys, values = ops.kv_append(k, v, keys, values, self._position)
        width = v.shape[2]
        out = ops.attention(
            q,
            keys,
            values,
            self._position,
            None if s_aux is None else s_aux.float(),
            width,
            float(q.shape[2] ** -0.5 if scaling is None else scaling),
            window,
            softcap or 0.0,
            chunk,
        )
        return out.to(query.dtype).reshape(1, q.shape[0], q.shape[1], width), None

    def _over_latents(
        self,
        module: torch.nn.Module,
        heads: LatentHeads,
        query: torch.Tensor,
        latents: torch.Tensor,
        settings: tuple[float, int, float, int],
    ) -> torch.Tensor:
        """[1, T, heads, value width]."""
        ops: Any = torch.ops.halfbyte
        rows, layer = _by_token(latents), module.layer_idx
        blank = isinstance(self._caches, str)
        cache: Any = ops.blank_latents(rows, self._caches) if blank else self._caches[layer]  # type: ignore[index]
        cache = ops.latent_append(rows, cache, self._position)
        q = heads.queries(_by_token(query))
        sums = ops.attention(q, cache, None, self._position, None, heads.rank, *settings)
        return heads.results(sums.unflatten(1, (-1, heads.rank)))[None]

    def turn(
        self,
        usual: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        forms: dict[bool, Form],
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' rotation, remembered: if its very results arrive at `attend`, what went in is used instead."""
        out = usual(q, k, cos, sin, *more, **options)
        for partial, form in forms.items():
            tables = [form.angles(table[0].float()) for table in (cos, sin)]
            if partial == (2 * tables[0].shape[-1] < q.shape[-1]) and not more and not options:
                self._turned[id(out[1])] = (*out, q, k, *tables, form.interleaved)
        return out


@contextlib.contextmanager
def attending(
    model: torch.nn.Module, caches: list[torch.Tensor] | str, position: torch.Tensor
) -> Iterator[Attending]:
    """While a transformers model is called: its attention layers use the halfbyte operators."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = model.config
    call, usual, module = Attending(caches, position, config), config._attn_implementation, modeling(model)
    forms = known_rotations(module)
    ALL_ATTENTION_FUNCTIONS[_NAME] = call.attend
    config._attn_implementation = _NAME
    rotation: Any = getattr(module, "apply_rotary_pos_emb", None)
    if forms:
        module.apply_rotary_pos_emb = functools.partial(call.turn, rotation, forms)
    try:
        with unexpanded(model):
            yield call
    finally:
        if forms:
            module.apply_rotary_pos_emb = rotation
        config._attn_implementation = usual
        del ALL_ATTENTION_FUNCTIONS[_NAME]


def modeling(model: torch.nn.Module) -> Any:
    """The Python module that a transformers model is from."""
    return sys.modules[type(model).__module__]


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] of [1, heads, T, D]."""
    return x[0].transpose(0, 1)
