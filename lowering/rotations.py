"""What a transformers family's rotation does, found by trying it on numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.passes.ops.kv_append import rotate

# How a table of angles is built from those of the pairs, and how these are taken out of it again.
_TABLES: tuple[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (lambda x: torch.cat([x, x], -1), lambda x: x[..., : x.shape[-1] // 2]),
    (lambda x: x.repeat_interleave(2, -1), lambda x: x[..., ::2]),
    (lambda x: x, lambda x: x),
)


@dataclass(frozen=True)
class Form:
    """A rotation that `halfbyte::rotate_append` computes.

    Attributes:
        interleaved: which columns are a pair.
        angles: what it needs out of a table of sines or cosines [..., columns].
    """

    interleaved: bool
    angles: Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def rotation_form(rotation: Callable[..., Any], partial: bool) -> Form | None:
    """The form of a family's ``apply_rotary_pos_emb(q, k, cos, sin)``, or None if it is none of ours.

    Args:
        rotation: the function; it is called with small tensors, so not while a graph is traced.
        partial: heads are wider than what is turned.
    """
    random = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, heads, 3, 12 if partial else 8, generator=random) for heads in (4, 2))
    angles = torch.randn(1, 3, 4, generator=random)
    for build, take in _TABLES:
        try:
            got = rotation(q, k, build(angles.cos()), build(angles.sin()))
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        for interleaved in (False, True):
            want = [
                rotate(x[0].transpose(0, 1), angles.cos()[0], angles.sin()[0], interleaved).transpose(0, 1)
                for x in (q, k)
            ]
            if all(
                a[0].shape == b.shape and torch.allclose(a[0], b, atol=1e-6)
                for a, b in zip(got, want, strict=True)
            ):
                return Form(interleaved, take)
    return None


def known_rotations(module: Any) -> dict[bool, Form]:
    """By whether heads are wider than what is turned: the form of the rotation of a Python module of transformers."""
    rotation = getattr(module, "apply_rotary_pos_emb", None)
    forms = {partial: rotation_form(rotation, partial) for partial in (False, True)} if rotation else {}
    return {partial: form for partial, form in forms.items() if form is not None}
