"""Whole models that PyTorch's tools quantized: compiled ones give what their own operators give, to float rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_bridge import array

import halfbyte

torchao = pytest.importorskip("torchao.quantization")


class _Logits(torch.nn.Module):
    """A small Llama of transformers', without caches."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": 160}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


def _compiled(module: torch.nn.Module, given: torch.Tensor, shapes: object, out: Path) -> halfbyte.Compiled:
    program = halfbyte.rewrite(module, (given,), dynamic_shapes=(shapes,))
    assert program.report.warnings == [] and program.report.refusals == []
    return halfbyte.compile(program, out)


def test_a_llama_of_8da4w(tmp_path: Path) -> None:
    """int4 weights in groups, activations int8 per token with zero points: W4A8 with torchao's own codes.

    A last bit of a norm turns a code here and there, and with it the tokens that see it: most are equal to 1e-6, where
    the kernels' own rounding leaves every token 1 % away.
    """
    model, tokens = _Logits(), torch.randint(0, 160, (1, 19), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        floats = array(model(tokens))
        config = torchao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=torchao.PerGroup(32)
        )
        torchao.quantize_(model, config)
        eager = array(model(tokens))
    shapes = {1: torch.export.Dim("T", min=2, max=64)}
    compiled = _compiled(model, tokens, shapes, tmp_path / "llama")
    rows = compiled.report["layers"]
    assert {(row["mode"], row["activations"]) for row in rows} == {("W4A8", "int8_affine")} and len(rows) == 8
    bundle = halfbyte.load(compiled.path)
    for count in (19, 7):
        [got] = bundle.call("forward", tokens[:, :count].numpy())
        errors = np.abs(got - eager[:, :count])[0].max(1) / np.abs(eager).max()
        assert np.median(errors) <= 1e-6 and errors.max() <= 0.02, errors
    assert np.abs(eager - floats).max() >= 0.05 * np.abs(eager).max()  # what quantizing costs


def test_static_scales_of_export_quantization(tmp_path: Path) -> None:
    """prepare_pt2e, calibration, convert_pt2e: a scale and zero point for all activations of a layer."""
    pytest.importorskip("torchao.quantization.pt2e")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(96, 72), torch.nn.ReLU(), torch.nn.Linear(72, 24)).eval()
    x, rows = torch.randn(9, 96), {0: torch.export.Dim("T", min=2, max=4096)}
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=False))
    prepared = prepare_pt2e(torch.export.export(model, (x,), dynamic_shapes=(rows,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    with torch.no_grad():
        eager = array(converted(x))
        again = torch.export.export(converted, (x,), dynamic_shapes=(rows,))
    program = halfbyte.rewrite(again)
    assert [(row.mode, row.activations) for row in program.report.layers] == [("W8A8", "int8_fixed")] * 2
    compiled = halfbyte.compile(program, tmp_path / "static")
    [got] = halfbyte.load(compiled.path).call("forward", x.numpy())
    np.testing.assert_allclose(got, eager, rtol=0, atol=4e-6 * np.abs(eager).max())
