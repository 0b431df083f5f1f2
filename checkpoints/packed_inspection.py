"""Checking the tensors of a layer of packed words against the model and the configuration."""

from __future__ import annotations

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.input_groups import is_sequential, read_g_idx, settle_group_size
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, require
from halfbyte.checkpoints.packed_config import LayerSetting, PackedConfig
from halfbyte.checkpoints.packed_layer import PackedLayer
from halfbyte.checkpoints.packing import Packing
from halfbyte.checkpoints.safetensors_file import StoredTensor
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError
from halfbyte.passes.words import words_for


def inspect_layer(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    config: PackedConfig,
    contradictions: Contradictions,
    glance: bool = False,
) -> PackedLayer:
    """Reads the small tensors (zero points, g_idx) of a layer that has a ``qweight``, and checks all shapes.

    Tensors decide where the configuration says something else that is possible; the difference is noted in
    `contradictions`.

    Args:
        name: module path.
        shape: (N, K) of the layer in the model.
        glance: look at the zero points of few groups only.

    Raises:
        CheckpointError: naming layer and tensor: one is missing, has a wrong shape or dtype, or impossible
            values.
    """
    setting = config.setting(name)
    if setting is None:
        contradictions.add(name, f"{config.where} leaves these layers in float, the tensors are quantized")
        setting = config.default
    packing, bits = _packing(name, shape, tensors, config, setting, contradictions)
    if bits not in packing.widths:
        return PackedLayer(name=name, shape=shape, bits=bits, packing=packing)
    require(name, tensors, "scales")
    groups = _groups(name, shape, tensors)
    g_idx = read_g_idx(name, "g_idx", shape[1], groups, tensors)
    if g_idx is None and setting.desc_act and groups > 1:
        raise missing_tensor([f"{name}.g_idx"], tensors, f"{config.where} says desc_act = true")
    said = setting.group_size
    group_size = settle_group_size(name, "scales", shape[1], groups, g_idx, said, contradictions)
    act_order = group_size > 0 and g_idx is not None and not is_sequential(g_idx, group_size)
    if act_order and setting.desc_act is False:
        contradictions.add(name, "the configuration says desc_act = false, g_idx is in activation order")
    symmetric = f"{name}.qzeros" not in tensors and packing.optional_zeros and setting.sym is True
    if not symmetric:
        require(name, tensors, "qzeros")
        check(name, "qzeros", tensors, (groups, words_for(shape[0], bits)), (torch.int32,))
        value = _only_zero(_zero_words(tensors[f"{name}.qzeros"], glance), shape[0], bits, packing)
        symmetric = _symmetric(name, value, bits, packing, config.where, setting, contradictions)
    return PackedLayer(
        name=name,
        shape=shape,
        bits=bits,
        packing=packing,
        groups=groups,
        group_size=group_size,
        symmetric=symmetric,
        act_order=act_order,
        scale_dtype=SCALE_DTYPES[tensors[f"{name}.scales"].dtype],
    )


def _packing(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    config: PackedConfig,
    setting: LayerSetting,
    contradictions: Contradictions,
) -> tuple[Packing, int]:
    """The layout and width that the shape of qweight tells; the configuration's for a width nothing here unpacks."""
    stored, meant = tensors[f"{name}.qweight"], config.packings[0]
    wanted = meant.codes_shape(shape, setting.bits)
    if stored.shape == wanted and stored.dtype == torch.int32:
        return meant, setting.bits
    fits = [
        (packing, bits)
        for packing in config.packings
        for bits in (setting.bits, *packing.widths)
        if bits in packing.widths and stored.shape == packing.codes_shape(shape, bits)
    ]
    if stored.dtype != torch.int32 or not fits:
        note = f" for bits = {setting.bits} in the layout of {meant.storage}"
        check(name, "qweight", tensors, wanted, (torch.int32,), note=note)
    packing, bits = fits[0]
    if setting.bits not in packing.widths:
        raise CheckpointError(
            "the configuration and the tensors disagree in bits",
            where=f"{name}.qweight",
            found=f"bits = {setting.bits} in the configuration, {list(stored.shape)} words",
            accepted=f"{list(wanted)} words for bits = {setting.bits}",
            advice="correct bits in the configuration, or fetch the checkpoint again",
        )
    if packing != meant:
        message = f"the configuration means the layout of {meant.storage}, the tensors have that of {packing.storage}"
        contradictions.add(name, message)
    if bits != setting.bits:
        message = f"the configuration says bits = {setting.bits}, the tensors hold {bits}-bit weights"
        contradictions.add(name, message)
    return packing, bits


def _groups(name: str, shape: tuple[int, int], tensors: SafetensorsFolder) -> int:
    stored = tensors[f"{name}.scales"]
    groups = stored.shape[0] if len(stored.shape) == 2 else 0
    check(name, "scales", tensors, (min(max(groups, 1), shape[1]), shape[0]), tuple(SCALE_DTYPES))
    return groups


def _symmetric(
    name: str,
    value: int | None,
    bits: int,
    packing: Packing,
    where: str,
    setting: LayerSetting,
    contradictions: Contradictions,
) -> bool:
    """Whether `value`, the zero point of all groups if they have one in common, is the middle of the codes."""
    middle = 1 << (bits - 1)
    if value == middle:
        return True
    # Stored in another version's way, a symmetric layer is off by exactly one everywhere.
    difference, other = packing.mistaken
    if setting.sym and value == middle + difference:
        raise CheckpointError(
            f"the zero points are stored as in {other}, the configuration means {packing.storage}",
            where=f"{name}.qzeros",
            found=f"{value} everywhere, where sym = true means {middle}",
            accepted=f"a configuration that says {other} for these tensors",
            advice=f"correct checkpoint_format in {where}; as it is, every weight is off by one scale",
        )
    if setting.sym:
        contradictions.add(name, f"the configuration says sym = true, the zero points are not all {middle}")
    return False


def _zero_words(stored: StoredTensor, glance: bool) -> torch.Tensor:
    """The words of all groups; at a glance of the first, a middle and the last one. All are many megabytes."""
    groups = stored.shape[0]
    return stored.rows(0, groups // 2, groups - 1) if glance else stored.read()


def _only_zero(qzeros: torch.Tensor, outputs: int, bits: int, packing: Packing) -> int | None:
    """The zero point that all groups of all outputs have, if there is one. Looks at as little as it can."""
    first = packing.zeros(qzeros[:1], outputs, bits)
    value = int(first[0, 0])
    if not bool((first == value).all()):
        return None
    same = torch.equal(qzeros, qzeros[:1].expand_as(qzeros))
    return value if same or bool((packing.zeros(qzeros, outputs, bits) == value).all()) else None
