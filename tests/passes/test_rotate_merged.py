"""Queries, keys and values that a linear left side by side are read there; others stay as they are."""

from __future__ import annotations

import itertools

import torch
from random_layers import random_activations
from rewritten_graphs import run_all
from torch.export import Dim
from torch_bridge import array, tensor

from halfbyte.passes.ops.attention_caches import key_cache_shape, value_cache_shape
from halfbyte.passes.pipeline import run_passes
from halfbyte.passes.program import Program
from halfbyte.passes.rotate_merged import RotateMerged

HEADS, KEY_HEADS, WIDTH, CONTEXT = 4, 2, 8, 64
COLUMNS = (HEADS + 2 * KEY_HEADS) * WIDTH


class Rotated(torch.nn.Module):
    """What a decoder's layer does with the columns of its merged linear; ``changed`` says what is different."""

    def __init__(self, changed: str = "") -> None:
        super().__init__()
        self.changed = changed
        self.caches = [
            torch.zeros(shape(KEY_HEADS, CONTEXT, WIDTH)) for shape in (key_cache_shape, value_cache_shape)
        ]

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        edges = [0, HEADS * WIDTH, (HEADS + KEY_HEADS) * WIDTH, COLUMNS]
        parts = [rows[..., start:end] for start, end in itertools.pairwise(edges)]
        if self.changed == "norm":
            parts[1] = parts[1] * 2
        if self.changed == "order":
            parts[1], parts[2] = parts[2], parts[1]
        heads = [part.view(1, rows.shape[1], -1, WIDTH).transpose(1, 2) for part in parts]
        q, k, v = (part[0].transpose(0, 1) for part in heads)
        angles = rows[0, :, :3]
        turned = torch.ops.halfbyte.rotate_append(
            q, k, v, angles.cos(), angles.sin(), False, *self.caches, torch.tensor([1])
        )
        return tuple(turned)


def rewritten(module: torch.nn.Module, columns: int = COLUMNS) -> tuple[list[str], bool]:
    """The rotations of a graph after the pass, and whether it computes what it did."""
    x = random_activations(1, 5, columns)[None]
    with torch.no_grad():
        shapes = ({1: Dim("T", min=2, max=32)},)
        exported = torch.export.export(module, (tensor(x),), dynamic_shapes=shapes, strict=False)
        want = [array(value) for value in module(tensor(x))]
    program = Program({"forward": exported})
    run_passes(program, [RotateMerged()])
    targets = [str(node.target) for node in exported.graph.nodes if "rotate" in str(node.target)]
    same = all((got == known).all() for got, known in zip(run_all(program, x), want, strict=True))
    return targets, same


def test_columns_side_by_side_are_read_where_they_are() -> None:
    assert rewritten(Rotated()) == (["halfbyte.rotate_append_merged.default"], True)


def test_what_does_not_fit_stays() -> None:
    for changed in ("norm", "order"):
        assert rewritten(Rotated(changed)) == (["halfbyte.rotate_append.default"], True), changed
    assert rewritten(Rotated(), COLUMNS + 8) == (["halfbyte.rotate_append.default"], True)
