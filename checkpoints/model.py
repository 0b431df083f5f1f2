"""From an opened checkpoint to a transformers model: with quantized modules, or with all weights in float."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from halfbyte.checkpoints.architecture import meta_model
from halfbyte.checkpoints.checkpoint import Checkpoint, LayerInfo
from halfbyte.checkpoints.expert_layers import experts_module
from halfbyte.checkpoints.experts import ExpertsShape
from halfbyte.checkpoints.latent_layers import EXPANDING
from halfbyte.errors import CheckpointError
from halfbyte.passes.latent_heads import LatentHeads
from halfbyte.passes.scheme import Activations, Fp8Scheme, WeightScheme
from halfbyte.passes.weighed_inputs import WeighedInputs

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
    latents: bool = False,
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
        latents: latent attention is over latents (`with_latents`), whose ``kv_b_proj`` becomes a `LatentHeads`.

    Raises:
        CheckpointError: when transformers cannot make the model.
    """
    model = meta_model(checkpoint.config, dtype)
    fill_buffers(checkpoint, model)
    for path, module in list(model.named_modules()):
        layer = checkpoint.layers.get(checkpoint.name_of(path))
        if latents and path.rpartition(".")[2] == EXPANDING:
            _replace(model, path, _latent_heads(model.get_submodule(path.rpartition(".")[0]), dtype))
        elif isinstance(module, torch.nn.Linear) and layer is not None and layer.scheme is not None:
            _replace(
                model, path, _quantized_module(checkpoint, path, layer, activations(layer), dtype, min_tokens)
            )
        elif (shape := ExpertsShape.of(module)) is not None:

            def linear(name: str) -> torch.nn.Module:
                layer = checkpoint.layers[checkpoint.name_of(name)]
                if layer.scheme is not None:
                    return _quantized_module(checkpoint, name, layer, activations(layer), dtype, min_tokens)
                outputs, inputs = layer.shape
                return torch.nn.Linear(inputs, outputs, bias=layer.bias, dtype=dtype, device="meta")

            made = experts_module(checkpoint, path, module, activations, _DIGITS[dtype], linear)
            _replace(model, path, made)
            if shape.weighed:
                block = path.rpartition(".")[0]
                parts: Any = model.get_submodule(block)
                _replace(model, block, WeighedInputs(parts.router, made, parts.shared_expert, parts.top_k))
    _replace_tables(checkpoint, model, dtype)
    replace_parameters(model, lambda _, meta: torch.empty(meta.shape, dtype=meta.dtype))
    return model.eval()


def _replace_tables(checkpoint: Checkpoint, model: Any, dtype: torch.dtype) -> None:
    """Keeps embeddings as they are stored, where no other module computes with their weight."""
    from halfbyte.passes.tables import FloatTable, IntegerTable

    holders = [id(weight) for _, weight in model.named_parameters(remove_duplicate=False)]
    for path, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Embedding) or holders.count(id(module.weight)) > 1:
            continue
        factor = getattr(module, "embed_scale", None)
        if type(module) is not torch.nn.Embedding and not isinstance(factor, torch.Tensor):
            continue  # whatever else it does with its rows
        name = checkpoint.name_of(path)
        table, stored = checkpoint.tables.get(name), checkpoint.floats.get(f"{name}.weight")
        shape = (module.num_embeddings, module.embedding_dim)
        if table is not None:
            assert isinstance(table.scheme, WeightScheme)
            _replace(model, path, IntegerTable(table.scheme, shape, dtype, factor))
        elif stored is not None and stored.dtype.itemsize < dtype.itemsize:
            _replace(model, path, FloatTable(shape, stored.dtype, dtype, factor))


def _quantized_module(
    checkpoint: Checkpoint,
    path: str,
    layer: LayerInfo,
    activations: Activations,
    dtype: torch.dtype,
    min_tokens: int,
) -> torch.nn.Module:
    from halfbyte.passes.fp8_linear import Fp8BlockLinear
    from halfbyte.passes.quant_linear import QuantLinear

    scheme = layer.scheme
    assert scheme is not None
    if isinstance(scheme, Fp8Scheme):
        return Fp8BlockLinear(path, scheme, layer.shape, bias=layer.bias, activations=activations)
    return QuantLinear(
        path,
        scheme,
        layer.shape,
        bias=layer.bias,
        activations=activations,
        digits=_DIGITS[dtype],
        min_tokens=min_tokens,
        permutation=checkpoint.permutation(layer.name),
        fixed=layer.fixed if activations is Activations.INT8_FIXED else None,
    )


def _latent_heads(attention: Any, dtype: torch.dtype) -> LatentHeads:
    return LatentHeads(
        attention.num_heads,
        attention.qk_nope_head_dim,
        attention.v_head_dim,
        attention.kv_lora_rank,
        dtype,
    )


def load_float_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    """The same model with every weight dequantized and filled in: the reference for `verify` and for tests.

    Args:
        checkpoint: an opened checkpoint.
        dtype: of the parameters; weights are rounded to it once.

    Raises:
        CheckpointError: a tensor with impossible values, or a layer that cannot be dequantized.
    """

    model = meta_model(checkpoint.config, dtype)
    fill_buffers(checkpoint, model)
    replace_parameters(
        model, lambda name, _: float_parameter(checkpoint, model, name).to(dtype).contiguous().clone()
    )
    return model.eval()


def float_parameter(checkpoint: Checkpoint, model: torch.nn.Module, name: str) -> torch.Tensor:
    """The value of a float parameter of the model, in its stored dtype; stacked ones are put together.

    Raises:
        CheckpointError: a tensor with impossible values, or a layer that cannot be dequantized.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, LatentHeads):
        return module.part(leaf, float_weight(checkpoint, checkpoint.name_of(f"{path}.weight")))
    experts, part = ExpertsShape.of(module), "bias" if leaf.endswith("_bias") else "weight"
    if experts is None:
        return float_weight(checkpoint, checkpoint.name_of(name))
    return experts.stack(
        leaf,
        lambda expert, linear: float_weight(
            checkpoint, checkpoint.name_of(f"{path}.{expert}.{linear}.{part}")
        ),
    )


def float_weight(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A weight or bias by its name in the checkpoint, dequantized where it is quantized.

    Raises:
        CheckpointError: a tensor with impossible values, or a layer that cannot be dequantized.
    """
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


def replace_parameters(model: torch.nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Puts a CPU tensor in place of every meta parameter; parameters that were one stay one."""
    made: dict[int, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, meta in list(module.named_parameters(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            if id(meta) not in made:
                made[id(meta)] = torch.nn.Parameter(make(name, meta), requires_grad=False)
            setattr(module, leaf, made[id(meta)])


def fill_buffers(checkpoint: Checkpoint, model: Any) -> None:
    """Reads the buffers that the checkpoint holds, and computes the others by making their modules again on the CPU."""
    for path, module in list(model.named_modules()):
        own = [key for key, value in module.named_buffers(recurse=False) if value.is_meta]
        stored = {key: checkpoint.name_of(f"{path}.{key}") for key in own}
        if not own:
            continue
        if all(name in checkpoint.floats for name in stored.values()):
            for key, name in stored.items():
                value = checkpoint.float_tensor(name).to(getattr(module, key).dtype)
                module.register_buffer(key, value.contiguous().clone())
        elif "config" in inspect.signature(type(module)).parameters:
            _replace(model, path, type(module)(config=model.config))
        else:
            _initialize(model, path, module, own)


def _initialize(model: Any, path: str, module: torch.nn.Module, buffers: list[str]) -> None:
    """Has transformers fill buffers as it does for models that it loads, such as the scale of Gemma's embedding."""
    for key in buffers:
        module.register_buffer(
            key, torch.full_like(getattr(module, key), torch.nan, device="cpu"), persistent=False
        )
    model._init_weights(module)
    for key in buffers:
        if bool(getattr(module, key).isnan().any()):
            raise CheckpointError(
                "a buffer of this model is neither stored nor computed",
                where=f"{path}.{key}",
                accepted="checkpoints of the supported model types",
            )
