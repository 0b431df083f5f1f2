"""Queries, keys and values that a linear left side by side are read there; others stay as they are."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from random_layers import random_activations
from rewritten_graphs import run_all
from torch.export import Dim
from torch_bridge import array, tensor

from halfbyte.passes.find_norms import FindNorms
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
        self.norms = torch.nn.ParameterList(torch.linspace(0.5, 1 + i, WIDTH) for i in range(2))
        self.caches = [
            torch.zeros(shape(KEY_HEADS, CONTEXT, WIDTH)) for shape in (key_cache_shape, value_cache_shape)
        ]

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        edges = [0, HEADS * WIDTH, (HEADS + KEY_HEADS) * WIDTH, COLUMNS]
        parts = [rows[..., start:end] for start, end in itertools.pairwise(edges)]
        if self.changed == "scaled":
            parts[1] = parts[1] * 2
        if self.changed == "order":
            parts[1], parts[2] = parts[2], parts[1]
        heads = [part.view(1, rows.shape[1], -1, WIDTH) for part in parts]
        normed = {"normed": (1e-5, 1e-5), "one normed": (1e-5,), "normed otherwise": (1e-5, 1e-6)}
        for i, eps in enumerate(normed.get(self.changed, ())):
            heads[i] = torch.nn.functional.rms_norm(heads[i], (WIDTH,), self.norms[i], eps)
        heads = [head.transpose(1, 2) for head in heads]
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
    run_passes(program, [FindNorms(), RotateMerged()])
    targets = [str(node.target) for node in exported.graph.nodes if "halfbyte" in str(node.target)]
    exact = not isinstance(module, Rotated) or "normed" not in module.changed
    near = {"rtol": 0, "atol": 0 if exact else 2e-6}
    same = all(np.allclose(got, known, **near) for got, known in zip(run_all(program, x), want, strict=True))
    return targets, same


def test_columns_side_by_side_are_read_where_they_are() -> None:
    assert rewritten(Rotated()) == (["halfbyte.rotate_append_merged.default"], True)


def test_norms_of_queries_and_keys_are_computed_there() -> None:
    assert rewritten(Rotated("normed")) == (["halfbyte.rotate_append_merged.default"], True)


def test_what_does_not_fit_stays() -> None:
    for changed in ("scaled", "order"):
        assert rewritten(Rotated(changed)) == (["halfbyte.rotate_append.default"], True), changed
    for changed, norms in (("one normed", 1), ("normed otherwise", 2)):
        kept = ["halfbyte.rms_norm_merged.default"] * norms + ["halfbyte.rotate_append.default"]
        assert rewritten(Rotated(changed)) == (kept, True), changed
    assert rewritten(Rotated(), COLUMNS + 8) == (["halfbyte.rotate_append.default"], True)
