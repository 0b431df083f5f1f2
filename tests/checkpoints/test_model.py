"""The models made of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_checkpoints import float_tensors, llama_config, write_folder
from made_experts import made_model
from model_families import DENSE
from transformers import LlamaForCausalLM

from halfbyte.checkpoints import LayerInfo, build_model, load_float_model, open_checkpoint
from halfbyte.passes.quant_linear import QuantLinear
from halfbyte.passes.scheme import Activations
from halfbyte.passes.tables import FloatTable


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 3), (torch.float16, 2), (torch.bfloat16, 2)])
def test_quantized_layers_are_replaced(data: Path, dtype: torch.dtype, digits: int) -> None:
    checkpoint = open_checkpoint(data / "qwen3-gptq-dynamic")

    def activations(layer: LayerInfo) -> Activations:
        return Activations.INT8 if "mlp" in layer.name else Activations.NONE

    model = build_model(checkpoint, dtype=dtype, activations=activations, min_tokens=7)
    for name, info in checkpoint.layers.items():
        module = model.get_submodule(name)
        assert isinstance(module, torch.nn.Linear if info.scheme is None else QuantLinear)
        if isinstance(module, QuantLinear):
            assert (module.name, module.scheme, module.shape) == (name, info.scheme, info.shape)
            assert (module.digits, module.min_tokens) == (digits, 7)
            assert module.activations is activations(info)
    assert all(not value.is_meta and value.dtype == dtype for value in model.parameters())
    assert not any(value.requires_grad for value in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    assert model.config._attn_implementation == "sdpa"


def test_activation_order_and_biases_reach_the_modules(data: Path) -> None:
    checkpoint = open_checkpoint(data / "qwen2-gptq-v1-actorder-g32")
    model = build_model(checkpoint)
    for name in checkpoint.layers:
        module = model.get_submodule(name)
        assert torch.equal(module.permutation, checkpoint.permutation(name))
        assert (module.bias is not None) == name.endswith(("q_proj", "k_proj", "v_proj"))


def test_rotary_frequencies_are_those_of_a_model_made_on_the_cpu(data: Path) -> None:
    checkpoint = open_checkpoint(data / "base-gptq")
    for model in (build_model(checkpoint, dtype=torch.bfloat16), load_float_model(checkpoint)):
        wanted = LlamaForCausalLM(model.config).model.rotary_emb.inv_freq
        assert torch.equal(model.model.rotary_emb.inv_freq, wanted)
        computed = [value for name, value in model.named_buffers() if "rotary" in name]
        assert computed
        assert not any(value.is_meta for value in computed)


def test_the_float_model_equals_transformers(tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=False)
    tensors = float_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    folder = write_folder(tmp_path, config | {"architectures": ["LlamaForCausalLM"]}, tensors)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(load_float_model(open_checkpoint(folder))(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize(
    ("tied", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)]
)
def test_embeddings_stay_as_they_are_stored(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    """Gemma's multiplies its rows, in the dtype of the model; a tied one in float is a head too."""
    made = made_model("gemma3_text", families=DENSE, tie_word_embeddings=tied)
    made.model.to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    table: Any = build_model(checkpoint, dtype=dtype).model.embed_tokens
    assert isinstance(table, FloatTable) == (not tied and dtype is torch.float32)
    if isinstance(table, FloatTable):
        table.weight.data = checkpoint.float_tensor("model.embed_tokens.weight")
        ids = torch.tensor([3, 0, 31])
        assert torch.equal(table(ids), load_float_model(checkpoint, dtype).model.embed_tokens(ids))
