"""Checking the tensors of a compressed-tensors layer against the model and the configuration."""

from __future__ import annotations

import dataclasses

import torch

from halfbyte.checkpoints.compressed_tensors_activations import with_activations
from halfbyte.checkpoints.compressed_tensors_args import QuantizationArgs
from halfbyte.checkpoints.compressed_tensors_config import CompressedTensorsConfig, Group
from halfbyte.checkpoints.compressed_tensors_layer import (
    PARTS,
    CompressedTensorsLayer,
    are_words,
    read_zeros,
)
from halfbyte.checkpoints.contradictions import Contradictions
from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.fp4_layer import Fp4Names, inspect_fp4
from halfbyte.checkpoints.fp8_layer import E4M3, inspect_fp8
from halfbyte.checkpoints.input_groups import is_sequential, read_g_idx, settle_group_size
from halfbyte.checkpoints.integer_layer import READABLE_BITS
from halfbyte.checkpoints.layer_tensors import SCALE_DTYPES, check, require
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.checkpoints.scale_blocks import ScaleBlocks, settle_blocks
from halfbyte.checkpoints.stored_layer import StoredLayer
from halfbyte.checkpoints.unreadable_layer import UnreadableLayer
from halfbyte.errors import CheckpointError
from halfbyte.passes.words import fields, words_for

_STRATEGIES = ("tensor", "channel", "group", "block")
# The formats whose name says where codes are.
_STORED = {
    **dict.fromkeys(("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"), "packed"),
    "int-quantized": "int8",
    "float-quantized": "fp8",
}
_NVFP4 = Fp4Names("weight_packed", "weight_scale", "weight_global_scale", divides=True, rest=PARTS)
_MXFP4 = Fp4Names("weight_packed", "weight_scale", rest=PARTS)


def is_quantized(name: str, tensors: SafetensorsFolder) -> bool:
    """Whether a layer's tensors are those of a quantized one."""
    if f"{name}.weight_packed" in tensors:
        return True
    weight = f"{name}.weight"
    return weight in tensors and tensors[weight].dtype in (torch.int8, E4M3)


def inspect_layer(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    config: CompressedTensorsConfig,
    contradictions: Contradictions,
    glance: bool = False,
) -> StoredLayer:
    """Reads the small tensors (zero points, g_idx, shape) of a quantized layer, and checks all shapes.

    The tensors say how codes are stored, whatever the format is called: weight_packed, or weight in int8 or e4m3.

    Args:
        name: module path.
        shape: (N, K) of the layer in the model.
        glance: look at the zero points of few outputs only.

    Raises:
        CheckpointError: naming layer and tensor: one is missing, has a wrong shape or dtype, or impossible
            values.
    """
    group = _group(name, config, contradictions)
    args = group.weights
    assert args is not None
    packed = f"{name}.weight_packed" in tensors
    stored = "packed" if packed else "fp8" if tensors[f"{name}.weight"].dtype == E4M3 else "int8"
    if group.format in _STORED and _STORED[group.format] != stored:
        contradictions.add(name, f"the format says {group.format}, the weights are stored {stored}")
    if group.outputs:
        contradictions.add(name, "the checkpoint asks for quantized outputs, here they are not")
    if packed and args.is_float and args.bits == 4:
        return _fp4(name, shape, tensors, group, contradictions)
    if args.strategy not in _STRATEGIES:
        found = f"weights {args}"
        return _unreadable(name, shape, stored, found, "one scale per " + ", ".join(_STRATEGIES))
    if stored == "fp8":
        return _fp8(name, shape, tensors, args, group, contradictions)
    if (why := _why_unreadable(name, shape, tensors, args, packed)) is not None:
        return _unreadable(name, shape, stored, why, "bits = 4 or 8")
    layer = _integer(name, shape, tensors, args, packed, contradictions, glance)
    return with_activations(layer, group.inputs, None, tensors, contradictions)


def _group(name: str, config: CompressedTensorsConfig, contradictions: Contradictions) -> Group:
    group = config.setting(name)
    if group is not None:
        return group
    contradictions.add(name, f"{config.where} leaves these layers in float, the tensors are quantized")
    if config.default is None:
        raise CheckpointError(
            "the layer is quantized, and the configuration does not say how",
            where=name,
            found="no group with weights",
            accepted="a group in config_groups whose targets name the layer",
        )
    return dataclasses.replace(config.default, inputs=None, format=None)


def _fp4(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    group: Group,
    contradictions: Contradictions,
) -> StoredLayer:
    """The tensors say which kind: only NVFP4 has a scale of the whole tensor."""
    whole = f"{name}.weight_global_scale" in tensors
    kind, names = ("nvfp4", _NVFP4) if whole else ("mxfp4", _MXFP4)
    layer = inspect_fp4(name, shape, kind, names, tensors)
    return with_activations(layer, group.inputs, None, tensors, contradictions)


def _fp8(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    args: QuantizationArgs,
    group: Group,
    contradictions: Contradictions,
) -> StoredLayer:
    if not args.is_float or args.bits != 8:
        contradictions.add(name, f"the configuration says weights {args}, the tensors are e4m3")
    layer = inspect_fp8(name, shape, _blocks(args, shape), tensors, contradictions)
    grouped = layer.blocks.strategy in ("group", "block")
    inputs = layer.blocks.inputs if grouped else None
    asked = group.inputs
    if asked is not None and asked.group_size is not None and grouped:
        # A group that is longer than the row is the row.
        asked = dataclasses.replace(asked, group_size=min(asked.group_size, shape[1]))
    return with_activations(layer, asked, inputs, tensors, contradictions)


def _blocks(args: QuantizationArgs, shape: tuple[int, int]) -> ScaleBlocks:
    outputs, inputs = args.block or (1, args.group_size or -1)
    return ScaleBlocks.of(args.strategy, shape, outputs, inputs)


def _why_unreadable(
    name: str, shape: tuple[int, int], tensors: SafetensorsFolder, args: QuantizationArgs, packed: bool
) -> str | None:
    if not packed:
        if args.is_float or args.bits not in READABLE_BITS:
            return f"weights {args}"
        check(name, "weight", tensors, shape, (torch.int8,))
        return None
    if args.is_float:
        return f"weights {args}"
    if args.bits not in READABLE_BITS:
        check(name, "weight_packed", tensors, (shape[0], words_for(shape[1], args.bits)), (torch.int32,))
        return f"bits = {args.bits}"
    return None


def _unreadable(name: str, shape: tuple[int, int], stored: str, found: str, accepted: str) -> UnreadableLayer:
    return UnreadableLayer(
        name=name, shape=shape, kind=f"ct {stored}", found=found, accepted=accepted, names=PARTS
    )


def _integer(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    args: QuantizationArgs,
    packed: bool,
    contradictions: Contradictions,
    glance: bool,
) -> CompressedTensorsLayer:
    require(name, tensors, "weight_scale")
    bits = _bits(name, shape, tensors, args, contradictions) if packed else args.bits
    scales = tensors[f"{name}.weight_scale"]
    said, ordered = _blocks(args, shape), f"{name}.weight_g_idx" in tensors and len(scales.shape) == 2
    if ordered:  # groups may have any size then: g_idx tells
        groups = max(1, min(scales.shape[1], shape[1]))
        check(name, "weight_scale", tensors, (shape[0], groups), tuple(SCALE_DTYPES))
        blocks = ScaleBlocks.of("group", shape)
    else:
        blocks = settle_blocks(name, "weight_scale", shape, said, tensors, contradictions)
        groups = blocks.grid(shape)[1]
    g_idx = read_g_idx(name, "weight_g_idx", shape[1], groups, tensors)
    if g_idx is None and args.act_order and groups > 1:
        raise missing_tensor([f"{name}.weight_g_idx"], tensors, "the configuration says actorder group")
    size = said.inputs if ordered else blocks.inputs
    size = settle_group_size(name, "weight_scale", shape[1], groups, g_idx, size, contradictions)
    act_order = size > 0 and g_idx is not None and not is_sequential(g_idx, size)
    if act_order and not args.act_order:
        contradictions.add(
            name, "the configuration says no actorder group, weight_g_idx is in activation order"
        )
    grid = (blocks.grid(shape)[0], groups)
    return CompressedTensorsLayer(
        name=name,
        shape=shape,
        bits=bits,
        groups=groups,
        group_size=size,
        symmetric=_symmetric(name, grid, bits, args, tensors, contradictions, glance),
        act_order=act_order,
        scale_dtype=SCALE_DTYPES[scales.dtype],
        blocks=blocks,
        packed=packed,
    )


def _bits(
    name: str,
    shape: tuple[int, int],
    tensors: SafetensorsFolder,
    args: QuantizationArgs,
    contradictions: Contradictions,
) -> int:
    """The width that the columns of weight_packed tell; checks weight_shape, where there is one."""
    _check_shape(name, shape, tensors)
    stored = tensors[f"{name}.weight_packed"]
    fits = [bits for bits in READABLE_BITS if stored.shape == (shape[0], words_for(shape[1], bits))]
    if not fits or stored.dtype != torch.int32:
        wanted = (shape[0], words_for(shape[1], args.bits))
        check(name, "weight_packed", tensors, wanted, (torch.int32,), note=f" for num_bits = {args.bits}")
    if args.bits in fits:
        return args.bits
    message = f"the configuration says num_bits = {args.bits}, the tensors hold {fits[0]}-bit weights"
    contradictions.add(name, message)
    return fits[0]


def _check_shape(name: str, shape: tuple[int, int], tensors: SafetensorsFolder) -> None:
    key = f"{name}.weight_shape"
    if key not in tensors:
        return
    check(name, "weight_shape", tensors, (2,), (torch.int64, torch.int32))
    found = tuple(tensors.read(key).tolist())
    if found != shape:
        raise CheckpointError(
            "weight_shape is not the shape of the layer in this model",
            where=key,
            found=str(list(found)),
            accepted=str(list(shape)),
            advice="config.json and the weights are of different models, or the file is damaged",
        )


def _symmetric(
    name: str,
    grid: tuple[int, int],
    bits: int,
    args: QuantizationArgs,
    tensors: SafetensorsFolder,
    contradictions: Contradictions,
    glance: bool,
) -> bool:
    if f"{name}.weight_zero_point" not in tensors:
        if not args.symmetric:
            raise missing_tensor(
                [f"{name}.weight_zero_point"], tensors, "the configuration says symmetric = false"
            )
        return True
    if bool((_zeros(name, grid, bits, tensors, glance) == 1 << (bits - 1)).all()):
        return True
    if args.symmetric:
        contradictions.add(
            name, "the configuration says symmetric = true, but there are zero points that are not 0"
        )
    return False


def _zeros(
    name: str, grid: tuple[int, int], bits: int, tensors: SafetensorsFolder, glance: bool
) -> torch.Tensor:
    """The zero points of a layer as uint8; at a glance those of its first outputs and of some in the middle."""
    stored, words = tensors[f"{name}.weight_zero_point"], are_words(name, grid, bits, tensors)
    if glance and len(stored.shape) == 2 and stored.shape[0] > 2:
        few = stored.rows(0, stored.shape[0] // 2)
        return fields(few, bits) if words else few.view(torch.uint8) + (1 << (bits - 1))
    zeros = read_zeros(name, grid, bits, tensors)
    assert zeros is not None
    return zeros
