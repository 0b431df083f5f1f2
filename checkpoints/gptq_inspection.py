"""Checking the tensors of a GPTQ layer against the model and the configuration."""

from __future__ import annotations

import torch

from halfbyte.checkpoints import gptq_packing as packing
from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.gptq_config import GptqConfig, LayerSetting
from halfbyte.checkpoints.gptq_layer import GptqLayer
from halfbyte.checkpoints.input_groups import is_sequential, read_g_idx, settle_group_size
from halfbyte.checkpoints.integer_layer import READABLE_BITS
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.words import WORD_BITS, words_for
from halfbyte.errors import CheckpointError


def inspect_layer(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    config: GptqConfig,
    contradictions: Contradictions,
) -> GptqLayer:
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
    bits = _bits(name, shape, tensors, setting, contradictions)
    if bits not in READABLE_BITS:
        return GptqLayer(name=name, shape=shape, bits=bits, version=config.version)
    require(name, tensors, "qzeros", "scales")
    groups = _groups(name, shape, tensors)
    check(name, "qzeros", tensors, (groups, words_for(shape[0], bits)), (torch.int32,))
    g_idx = read_g_idx(name, "g_idx", shape[1], groups, tensors)
    if g_idx is None and setting.desc_act and groups > 1:
        raise missing_tensor([f"{name}.g_idx"], tensors, f"{config.where} says desc_act = true")
    said = setting.group_size
    group_size = settle_group_size(name, "scales", shape[1], groups, g_idx, said, contradictions)
    act_order = group_size > 0 and g_idx is not None and not is_sequential(g_idx, group_size)
    if act_order and setting.desc_act is False:
        contradictions.add(name, "the configuration says desc_act = false, g_idx is in activation order")
    return GptqLayer(
        name=name,
        shape=shape,
        bits=bits,
        version=config.version,
        groups=groups,
        group_size=group_size,
        symmetric=_symmetric(name, shape, bits, config, setting, tensors, contradictions),
        act_order=act_order,
        scale_dtype=SCALE_DTYPES[tensors[f"{name}.scales"].dtype],
    )


def _bits(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    setting: LayerSetting,
    contradictions: Contradictions,
) -> int:
    """The width that the rows of qweight tell; the configuration's for one this reader does not unpack."""
    outputs, inputs = shape
    if inputs % (WORD_BITS // 4):
        raise CheckpointError(
            "the number of inputs does not fill whole words",
            where=name,
            found=f"K = {inputs}",
            accepted="a multiple of 8",
        )
    stored = tensors[f"{name}.qweight"]
    wanted = (inputs * setting.bits // WORD_BITS, outputs)
    if stored.shape == wanted and stored.dtype == torch.int32:
        return setting.bits
    fits = [bits for bits in READABLE_BITS if stored.shape == (inputs * bits // WORD_BITS, outputs)]
    if stored.dtype != torch.int32 or not fits:
        check(name, "qweight", tensors, wanted, (torch.int32,), note=f" for bits = {setting.bits}")
    if setting.bits not in READABLE_BITS:
        raise CheckpointError(
            "the configuration and the tensors disagree in bits",
            where=f"{name}.qweight",
            found=f"bits = {setting.bits} in the configuration, {list(stored.shape)} words",
            accepted=f"{list(wanted)} words for bits = {setting.bits}",
            advice="correct bits in the configuration, or fetch the checkpoint again",
        )
    message = f"the configuration says bits = {setting.bits}, the tensors hold {fits[0]}-bit weights"
    contradictions.add(name, message)
    return fits[0]


def _groups(name: str, shape: tuple[int, int], tensors: SafetensorsFolder) -> int:
    stored = tensors[f"{name}.scales"]
    groups = stored.shape[0] if len(stored.shape) == 2 else 0
    check(name, "scales", tensors, (min(max(groups, 1), shape[1]), shape[0]), tuple(SCALE_DTYPES))
    return groups


def _symmetric(
    name: str,
    shape: tuple[int, int],
    bits: int,
    config: GptqConfig,
    setting: LayerSetting,
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
) -> bool:
    zeros = packing.unpack_zeros(tensors.read(f"{name}.qzeros"), bits, config.version, shape[0])
    middle = 1 << (bits - 1)
    if bool((zeros == middle).all()):
        return True
    # Stored in the other version's way, a symmetric layer is off by exactly one everywhere.
    other = 3 - config.version
    if setting.sym and bool((zeros == (middle + 1 if config.version == 1 else middle - 1)).all()):
        raise CheckpointError(
            f"the zero points are stored as in version {other}, the configuration means {config.version}",
            where=f"{name}.qzeros",
            found=f"{int(zeros[0, 0])} everywhere, where sym = true means {middle}",
            accepted=f"checkpoint_format {'gptq_v2' if other == 2 else 'gptq'} for these tensors",
            advice=f"set checkpoint_format in {config.where}; as it is, every weight is off by one scale",
        )
    if setting.sym:
        contradictions.add(name, f"the configuration says sym = true, the zero points are not all {middle}")
    return False
