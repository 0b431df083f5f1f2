"""Attention of transformers' decoders by the halfbyte operators, over caches in their own layout."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import halfbyte.passes.ops  # noqa: F401  registers torch.ops.halfbyte

_NAME = "halfbyte"
# Families whose rotary tables are taken apart: how often an angle is in them.
_ANGLES = {
    "llama": 2,
    "qwen2": 2,
    "qwen3": 2,
    "mixtral": 2,
    "olmoe": 2,
    "qwen2_moe": 2,
    "qwen3_moe": 2,
    "granitemoe": 2,
    "glm4_moe": 2,
    "gpt_oss": 1,
}


class Attending:
    """The attention of one call of a model, as transformers' attention layers see it.

    It is their cache too, which hands on what is new: the caches are read and written by `attend` alone.

    Args:
        caches: k0, v0, k1, v1, ...; for a call that keeps nothing, what it rounds keys and values to.
        position: int64 [1], of the first token.
    """

    def __init__(self, caches: list[torch.Tensor] | str, position: torch.Tensor) -> None:
        self._caches, self._position = caches, position
        self._turned: dict[int, tuple[torch.Tensor, ...]] = {}
        self.is_compileable = True

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0

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
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """An attention function of transformers: q, k, v are those of the new tokens, [1, heads, T, D]."""
        ops: Any = torch.ops.halfbyte
        k, v = _by_token(key), _by_token(value)
        if isinstance(self._caches, str):
            keys, values = ops.blank_caches(k, v, self._caches)
        else:
            layer: Any = module.layer_idx
            keys, values = self._caches[2 * layer : 2 * layer + 2]
        turned = self._turned.get(id(key))
        if turned is not None and turned[0] is query:
            q, k, cos, sin = turned[2:]
            q, keys, values = ops.rotate_append(
                _by_token(q), _by_token(k), v, cos, sin, False, keys, values, self._position
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
            sliding_window or 0,
            softcap or 0.0,
        )
        return out.to(query.dtype).reshape(1, q.shape[0], q.shape[1], width), None

    def turn(
        self,
        usual: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        angles: int,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' rotation, remembered: if its very results arrive at `attend`, what went in is used instead."""
        out = usual(q, k, cos, sin, *more, **options)
        tables = [table[0, :, : table.shape[-1] // angles].float() for table in (cos, sin)]
        self._turned[id(out[1])] = (*out, q, k, *tables)
        return out


@contextlib.contextmanager
def attending(
    model: torch.nn.Module, caches: list[torch.Tensor] | str, position: torch.Tensor
) -> Iterator[Attending]:
    """While a transformers model is called: its attention layers use the halfbyte operators."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    call, config = Attending(caches, position), _config(model)
    usual, rotations = config._attn_implementation, _rotations(model)
    ALL_ATTENTION_FUNCTIONS[_NAME] = call.attend
    config._attn_implementation = _NAME
    for module, angles in rotations.items():
        module.apply_rotary_pos_emb = functools.partial(call.turn, module.apply_rotary_pos_emb, angles)
    try:
        yield call
    finally:
        for module in rotations:
            module.apply_rotary_pos_emb = module.apply_rotary_pos_emb.args[0]
        config._attn_implementation = usual
        del ALL_ATTENTION_FUNCTIONS[_NAME]


def _rotations(model: torch.nn.Module) -> dict[Any, int]:
    """Python modules of the model whose rotation is followed."""
    angles = _ANGLES.get(_config(model).model_type)
    return {} if angles is None else {sys.modules[type(model).__module__]: angles}


def _config(model: torch.nn.Module) -> Any:
    return model.config


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] of [1, heads, T, D]."""
    return x[0].transpose(0, 1)
