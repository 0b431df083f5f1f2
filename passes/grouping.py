"""Finds the groups of a dequantized weight from where its scales and zero points change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Grouping:
    """Groups of K inputs.

    Attributes:
        group_size: inputs per group; the last may be shorter.
        first: int64 [G], after the permutation, the first input of each group.
        permutation: int64 [K] that makes groups contiguous, or None when they are.
    """

    group_size: int
    first: torch.Tensor
    permutation: torch.Tensor | None


def find_groups(columns: torch.Tensor) -> Grouping:
    """Groups inputs whose scales and zero points are the same for every output.

    Args:
        columns: [R, K]; inputs k and l can share a group when columns[:, k] equals columns[:, l]
            (the scales and the zero points of all outputs, one under the other).

    Neighbouring groups that happen to be equal make one larger group, which computes the same weights.
    """
    inputs = columns.shape[1]
    _, label = torch.unique(columns, dim=1, return_inverse=True)
    changes = int((label[1:] != label[:-1]).sum()) + 1
    permutation = None
    if changes > int(label.max()) + 1 if inputs else False:
        # Not contiguous. Labels are numbered by value; number them by first use, the shortest last.
        counts = torch.bincount(label)
        usual = int(counts.max())
        order = {int(value): rank for rank, value in enumerate(dict.fromkeys(label.tolist()))}
        ranks = [order[int(value)] + (inputs if int(counts[value]) % usual else 0) for value in label]
        permutation = torch.argsort(torch.tensor(ranks), stable=True)
        label = label[permutation]
    group_size = _size(label)
    return Grouping(group_size, torch.arange(0, inputs, group_size), permutation)


def find_blocks(values: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the largest blocks that values [N, K] are constant in; the last ones may be smaller."""
    rows, columns = (torch.unique(values, dim=axis, return_inverse=True)[1] for axis in (0, 1))
    return _size(rows), _size(columns)


def _size(labels: torch.Tensor) -> int:
    """The largest size of groups of neighbours that have one label each."""
    borders = (torch.nonzero(labels[1:] != labels[:-1]).flatten() + 1).tolist()
    return math.gcd(*borders) if borders else len(labels)
