"""Checking the tensors of a layer of packed words against the model and the configuration."""

from __future__ import annotations

import torch

from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.packed_config import LayerSetting, PackedConfig
from halfbyte.checkpoints.packed_layer import PackedLayer
from halfbyte.checkpoints.packing import Packing, sequential
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.words import words_for
from halfbyte.errors import CheckpointError

_SCALE_DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


def inspect_layer(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    config: PackedConfig,
    contradictions: Contradictions,
) -> PackedLayer:
    """Reads the small tensors (zero points, g_idx) of a layer that has a ``qweight``, and checks all shapes.

    Tensors decide where the configuration says something else that is possible; the difference is noted in
    `contradictions`.

    Args:
        name: module path.
        shape: (N, K) of the layer in the model.

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
        return PackedLayer(name, shape, bits, packing)
    _require(name, tensors, "scales")
    groups = _groups(name, shape, tensors)
    g_idx = read_g_idx(name, shape[1], groups, tensors)
    if g_idx is None and setting.desc_act and groups > 1:
        raise missing_tensor([f"{name}.g_idx"], tensors, f"{config.where} says desc_act = true")
    group_size = _group_size(name, shape[1], groups, g_idx, setting, contradictions)
    act_order = group_size > 0 and g_idx is not None and not _is_sequential(g_idx, group_size)
    if act_order and setting.desc_act is False:
        contradictions.add(name, "the configuration says desc_act = false, g_idx is in activation order")
    symmetric = f"{name}.qzeros" not in tensors and packing.optional_zeros and setting.sym is True
    if not symmetric:
        _require(name, tensors, "qzeros")
        _check(name, "qzeros", tensors, (groups, words_for(shape[0], bits)), (torch.int32,))
        symmetric = _symmetric(name, shape[0], bits, packing, config.where, setting, tensors, contradictions)
    scale_dtype = _SCALE_DTYPES[tensors[f"{name}.scales"].dtype]
    return PackedLayer(name, shape, bits, packing, groups, group_size, symmetric, act_order, scale_dtype)


def read_g_idx(name: str, inputs: int, groups: int, tensors: SafetensorsFolder) -> torch.Tensor | None:
    """int64 [K], the group of every input as stored; None when the file does not say (then k // group_size).

    Raises:
        CheckpointError: a wrong shape or dtype, or a group that does not exist.
    """
    key = f"{name}.g_idx"
    if key not in tensors or tensors[key].shape == (0,):
        return None
    _check(name, "g_idx", tensors, (inputs,), (torch.int32, torch.int64))
    g_idx = tensors.read(key).to(torch.int64)
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            "g_idx names a group that does not exist",
            where=key,
            found=f"{low} to {high}",
            accepted=f"0 to {groups - 1}, as there are {groups} rows of scales",
        )
    return g_idx


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
        _check(name, "qweight", tensors, wanted, (torch.int32,), note=note)
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
    _check(name, "scales", tensors, (min(max(groups, 1), shape[1]), shape[0]), tuple(_SCALE_DTYPES))
    return groups


def _group_size(
    name: str,
    inputs: int,
    groups: int,
    g_idx: torch.Tensor | None,
    setting: LayerSetting,
    contradictions: Contradictions,
) -> int:
    said = inputs if setting.group_size == -1 else min(setting.group_size, inputs)
    if g_idx is None:
        if groups != -(-inputs // said):
            raise CheckpointError(
                "the number of groups does not follow from group_size, and there is no g_idx that would tell",
                where=f"{name}.scales",
                found=f"{groups} groups",
                accepted=f"{-(-inputs // said)} = ceil({inputs} / {said})",
                advice="correct group_size in the configuration",
            )
        return said
    size = int(torch.bincount(g_idx, minlength=groups)[0])
    if size == 0 or not torch.equal(g_idx.sort().values, sequential(size, inputs)):
        return 0
    if groups != -(-inputs // size):
        raise CheckpointError(
            "there are more rows of scales than groups in g_idx",
            where=f"{name}.scales",
            found=f"{groups}",
            accepted=f"{-(-inputs // size)}",
        )
    if size != said:
        contradictions.add(
            name, f"the configuration says group_size = {setting.group_size}, g_idx has groups of {size}"
        )
    return size


def _symmetric(
    name: str,
    outputs: int,
    bits: int,
    packing: Packing,
    where: str,
    setting: LayerSetting,
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
) -> bool:
    middle = 1 << (bits - 1)
    value = _only_zero(tensors.read(f"{name}.qzeros"), outputs, bits, packing)
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


def _only_zero(qzeros: torch.Tensor, outputs: int, bits: int, packing: Packing) -> int | None:
    """The zero point that all groups of all outputs have, if there is one. Looks at as little as it can."""
    first = packing.zeros(qzeros[:1], outputs, bits)
    value = int(first[0, 0])
    if not bool((first == value).all()):
        return None
    same = torch.equal(qzeros, qzeros[:1].expand_as(qzeros))
    return value if same or bool((packing.zeros(qzeros, outputs, bits) == value).all()) else None


def _is_sequential(g_idx: torch.Tensor, group_size: int) -> bool:
    return torch.equal(g_idx, sequential(group_size, len(g_idx)))


def _require(name: str, tensors: SafetensorsFolder, *parts: str) -> None:
    missing = [f"{name}.{part}" for part in parts if f"{name}.{part}" not in tensors]
    if missing:
        raise missing_tensor(missing, tensors, name)


def _check(
    name: str,
    part: str,
    tensors: SafetensorsFolder,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    note: str = "",
) -> None:
    stored = tensors[f"{name}.{part}"]
    if stored.shape != shape or stored.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            f"{part} does not fit the layer",
            where=f"{name}.{part}",
            found=f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}",
            accepted=f"{kinds} {list(shape)}{note}",
            advice="config.json and the weights are of different models, or the file is damaged",
        )
