"""Which group every input of a layer is in: ``g_idx`` where a file has one, else neighbours."""

from __future__ import annotations

import functools

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.layer_tensors import check
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError

_MAY_BE_UNSET = "weight_g_idx"


@functools.lru_cache(maxsize=16)
def sequential(group_size: int, inputs: int) -> torch.Tensor:
    """int64 [K]: the group of every input when groups are contiguous. Shared: not to be written to."""
    return torch.arange(inputs) // group_size


def is_sequential(g_idx: torch.Tensor, group_size: int) -> bool:
    return torch.equal(g_idx, sequential(group_size, len(g_idx)))


def read_g_idx(
    name: str, part: str, inputs: int, groups: int, tensors: SafetensorsFolder
) -> torch.Tensor | None:
    """int64 [K], the group of every input as stored; None when the file does not say (then k // group_size).

    compressed-tensors fills its ``weight_g_idx`` with -1 where it means nothing.

    Args:
        part: ``g_idx`` or what the format calls it.

    Raises:
        CheckpointError: a wrong shape or dtype, or a group that does not exist.
    """
    key = f"{name}.{part}"
    if key not in tensors or tensors[key].shape == (0,):
        return None
    check(name, part, tensors, (inputs,), (torch.int32, torch.int64))
    g_idx = tensors.read(key).to(torch.int64)
    low, high = int(g_idx.min()), int(g_idx.max())
    if low == high == -1 and part == _MAY_BE_UNSET:
        return None
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"{part} names a group that does not exist",
            where=key,
            found=f"{low} to {high}",
            accepted=f"0 to {groups - 1}, as there are {groups} groups of scales",
        )
    return g_idx


def settle_group_size(
    name: str,
    scales: str,
    inputs: int,
    groups: int,
    g_idx: torch.Tensor | None,
    said: int,
    contradictions: Contradictions,
) -> int:
    """Inputs per group by what the tensors tell; 0 when groups have unequal sizes.

    Args:
        scales: what the tensor of scales is called.
        groups: how many groups it has.
        g_idx: as stored, or None.
        said: group_size of the configuration, -1 for one group per row.

    Raises:
        CheckpointError: the number of groups follows neither from the configuration nor from g_idx.
    """
    wanted = inputs if said == -1 else min(said, inputs)
    if g_idx is None:
        if groups != -(-inputs // wanted):
            raise CheckpointError(
                "the number of groups does not follow from group_size, and there is no g_idx that would tell",
                where=f"{name}.{scales}",
                found=f"{groups} groups",
                accepted=f"{-(-inputs // wanted)} = ceil({inputs} / {wanted})",
                advice="correct group_size in the configuration",
            )
        return wanted
    size = _size_of_all(g_idx, groups, wanted)
    if size == 0:
        return 0
    if groups != -(-inputs // size):
        raise CheckpointError(
            "there are more groups of scales than groups in g_idx",
            where=f"{name}.{scales}",
            found=f"{groups}",
            accepted=f"{-(-inputs // size)}",
        )
    if size != wanted:
        contradictions.add(name, f"the configuration says group_size = {said}, g_idx has groups of {size}")
    return size


def _size_of_all(g_idx: torch.Tensor, groups: int, likely: int) -> int:
    """Inputs per group, the last perhaps with fewer; 0 when sizes are unequal."""
    if is_sequential(g_idx, likely):
        return likely
    size = int(torch.bincount(g_idx, minlength=groups)[0])
    return size if size and torch.equal(g_idx.sort().values, sequential(size, len(g_idx))) else 0
