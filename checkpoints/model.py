"""From an opened checkpoint to a transformers model: with quantized modules, or with all weights in float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfbyte.checkpoints.architecture import meta_model
from halfbyte.checkpoints.checkpoint import Checkpoint, LayerInfo
from halfbyte.errors import CheckpointError
from halfbyte.passes.scheme import Activations, Fp8Scheme, Scheme

# Digit planes that hold a float activation to its own precision.
_DIGITS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}


def as_the_checkpoint_asks(layer: LayerInfo) -> Activations:
    """The activations that the checkpoint itself asks for."""
    return layer.activations


def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    activations: Callable[[LayerInfo], Activations] = as_the_checkpoint_asks,
    min_tokens: int = 0,
) -> Any:
    """The model for tracing: transformers' causal language model with quantized modules in place.

    Layers with integer weights become a `QuantLinear`, those with e4m3 weights an `Fp8BlockLinear`.

    Parameters are uninitialized memory that nothing has touched yet, so they cost none; the weights of
    quantized modules are on the meta device; buffers that the model computes (rotary frequencies) are real.

    Args:
        checkpoint: an opened checkpoint.
        dtype: float32, float16 or bfloat16, of the model's parameters and activations.
        activations: what each quantized layer does to its input.
        min_tokens: see ``halfbyte::linear``; layers with e4m3 weights have no such switch.

    Raises:
        CheckpointError: when transformers cannot make the model.
    """
    model = meta_model(checkpoint.config, dtype)
    _fill_computed_buffers(model)
    for name, layer in checkpoint.layers.items():
        if layer.scheme is not None:
            module = _quantized_module(checkpoint, layer, layer.scheme, activations(layer), dtype, min_tokens)
            _replace(model, name, module)
    _replace_parameters(model, lambda _, meta: torch.empty(meta.shape, dtype=meta.dtype))
    return model.eval()


def _quantized_module(
    checkpoint: Checkpoint,
    layer: LayerInfo,
    scheme: Scheme,
    activations: Activations,
    dtype: torch.dtype,
    min_tokens: int,
) -> torch.nn.Module:
    from halfbyte.passes.fp8_linear import Fp8BlockLinear
    from halfbyte.passes.quant_linear import QuantLinear

    if isinstance(scheme, Fp8Scheme):
        return Fp8BlockLinear(layer.name, scheme, layer.shape, bias=layer.bias, activations=activations)
    return QuantLinear(
        layer.name,
        scheme,
        layer.shape,
        bias=layer.bias,
        activations=activations,
        digits=_DIGITS[dtype],
        min_tokens=min_tokens,
        permutation=checkpoint.permutation(layer.name),
    )


def load_float_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    """The same model with every weight dequantized and filled in: the reference for `verify` and for tests.

    Args:
        checkpoint: an opened checkpoint.
        dtype: of the parameters; weights are rounded to it once.

    Raises:
        CheckpointError: a tensor with impossible values, or a layer that cannot be dequantized.
    """

    def read(name: str, meta: torch.Tensor) -> torch.Tensor:
        return _float_weight(checkpoint, name).to(dtype).contiguous().clone()

    model = meta_model(checkpoint.config, dtype)
    _fill_computed_buffers(model)
    _replace_parameters(model, read)
    return model.eval()


def _float_weight(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    layer = checkpoint.layers.get(name.removesuffix(".weight"))
    if name.endswith(".weight") and layer is not None and layer.scheme is not None:
        return checkpoint.quantized(layer.name).dequantize()
    if name in checkpoint.floats:
        return checkpoint.float_tensor(name)
    refusal = layer.refusal if layer is not None else None
    raise CheckpointError(
        "the weight of this layer cannot be read",
        where=name,
        found=refusal.found if refusal else None,
        accepted=refusal.accepted if refusal else None,
    )


def _replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _replace_parameters(model: Any, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Puts a CPU tensor in place of every meta parameter; parameters that were one stay one."""
    made: dict[int, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, meta in list(module.named_parameters(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            if id(meta) not in made:
                made[id(meta)] = torch.nn.Parameter(make(name, meta), requires_grad=False)
            setattr(module, leaf, made[id(meta)])


def _fill_computed_buffers(model: Any) -> None:
    """Computes the buffers that no checkpoint holds, by making the modules that own them again on the CPU."""
    for name, module in list(model.named_modules()):
        own = [key for key, value in module.named_buffers(recurse=False) if value.is_meta]
        if own:
            _replace(model, name, type(module)(config=model.config))
