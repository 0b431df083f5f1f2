"""RMSNorms as families spell them become ``halfbyte::rms_norm``; what fits no form stays, and the report says why."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from norm_twin import rms_norm
from numpy_twin import Array, same_bits
from random_layers import random_activations
from rewritten_graphs import export, run
from torch_bridge import array, tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm, Llama4TextRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from halfbyte.passes.find_norms import DONE, FindNorms
from halfbyte.passes.pipeline import run_passes
from halfbyte.passes.program import Program

EPS, WIDTH = 1e-5, 48
# Of each family: the module, what is added to its weight, whether it rounds before the weight multiplies.
FAMILIES: dict[str, tuple[torch.nn.Module, bool, bool]] = {
    "qwen3": (Qwen3RMSNorm(WIDTH, EPS), False, True),
    "llama4": (Llama4TextRMSNorm(WIDTH, EPS), False, True),
    "llama4 unweighted": (Llama4TextL2Norm(EPS), False, False),
    "olmo2": (Olmo2RMSNorm(WIDTH, EPS), False, False),
    "gemma3": (Gemma3RMSNorm(WIDTH, EPS), True, False),
    "gemma4": (Gemma4RMSNorm(WIDTH, EPS), False, False),
    "gemma4 unweighted": (Gemma4RMSNorm(WIDTH, EPS, with_scale=False), False, False),
    "torch": (torch.nn.RMSNorm(WIDTH, EPS), False, False),
}


def found(module: torch.nn.Module, x: Array) -> Program:
    program = Program({"forward": export(module, x)})
    run_passes(program, [FindNorms()])
    return program


def calls(program: Program) -> list[Any]:
    nodes = program.entries["forward"].graph.nodes
    return [node for node in nodes if node.op == "call_function" and "sym_size" not in str(node.target)]


def names(program: Program) -> list[str]:
    return [str(node.target).removesuffix(".default") for node in calls(program)]


def _weighted(module: torch.nn.Module) -> torch.nn.Module:
    for weight in module.parameters():
        weight.data = torch.linspace(-0.7, 1.9, WIDTH).to(weight.dtype)
    return module


@pytest.mark.parametrize("io", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, io: str) -> None:
    module, plus_one, rounds = FAMILIES[family]
    x = random_activations(3, 9, WIDTH, io)
    module = _weighted(module.to(tensor(x).dtype))  # type: ignore[union-attr]
    before = module(tensor(x)).detach()
    program = found(module, x)
    assert [name for name in names(program) if name != "aten.type_as" and "to.dtype" not in name] == [
        "halfbyte.rms_norm"
    ]
    assert list(program.report.norms.values()) == [DONE]
    weights = [array(weight) for weight in module.parameters()]
    weight = weights[0] if weights else None
    got = run(program, x)
    assert same_bits(got, rms_norm(x, weight, EPS, plus_one, rounds and io != "f32"))
    near = {"f32": 1e-6, "f16": 2e-3, "bf16": 1.6e-2}[io]
    assert np.allclose(got.astype(np.float32), before.float().numpy(), rtol=near, atol=0)


class Attention(torch.nn.Module):
    """Norms of queries and keys by head, of columns that one linear gave."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (_weighted(Qwen3RMSNorm(WIDTH, EPS)) for _ in range(2))
        self.transposed = transposed

    def heads(self, columns: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
        apart = columns.view(1, columns.shape[1], -1, WIDTH)
        if self.transposed:
            return norm(apart.transpose(1, 2))[0].transpose(0, 1)
        return norm(apart).transpose(1, 2)[0].transpose(0, 1)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (qkv[None, :, start * WIDTH : end * WIDTH] for start, end in ((0, 3), (3, 5), (5, 7)))
        both = torch.cat([self.heads(q, self.q_norm), self.heads(k, self.k_norm)], 1)
        return torch.cat([both, v.reshape(-1, 2, WIDTH)], 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_heads_are_normed_where_a_linear_left_them(transposed: bool) -> None:
    module, x = Attention(transposed), random_activations(4, 5, 7 * WIDTH)
    program = found(module, x)
    merged = [node for node in calls(program) if "rms_norm" in str(node.target)]
    assert {node.target for node in merged} == {torch.ops.halfbyte.rms_norm_merged.default}
    assert sorted(node.args[1:4] for node in merged) == [(0, 3, WIDTH), (3 * WIDTH, 2, WIDTH)]
    assert program.report.norms == {"q_norm": DONE, "k_norm": DONE}
    weight = array(module.q_norm.weight)
    heads = rms_norm(x[:, : 5 * WIDTH].reshape(-1, WIDTH), weight, EPS).reshape(5, 5, WIDTH)
    want = np.concatenate([heads, x[:, 5 * WIDTH :].reshape(5, 2, WIDTH)], 1)
    assert same_bits(run(program, x), want)


def test_a_norm_of_all_columns_of_a_part() -> None:
    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Olmo2RMSNorm(WIDTH, EPS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x[:, WIDTH : 2 * WIDTH])

    x = random_activations(4, 5, 3 * WIDTH)
    program = found(Part(), x)
    [node] = [node for node in calls(program) if "rms_norm" in str(node.target)]
    assert node.args[1:4] == (WIDTH, 1, WIDTH)
    assert same_bits(run(program, x), rms_norm(x[:, WIDTH : 2 * WIDTH], np.ones(WIDTH, np.float32), EPS))


def test_of_rows_of_which_one_is_read_that_one_is_normed() -> None:
    class Head(torch.nn.Module):
        def __init__(self, all_rows: bool) -> None:
            super().__init__()
            self.norm, self.all_rows = Qwen3RMSNorm(WIDTH, EPS), all_rows

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.norm(x)
            return rows[-1] * rows.sum() if self.all_rows else 2 * rows[-1]

    x = random_activations(4, 5, WIDTH)
    order = [name for name in names(found(Head(False), x)) if "select" in name or "rms" in name]
    assert order == ["aten.select.int", "halfbyte.rms_norm"]
    order = [name for name in names(found(Head(True), x)) if "select" in name or "rms" in name]
    assert order == ["halfbyte.rms_norm", "aten.select.int"]
    want = 2 * rms_norm(x[-1:], np.ones(WIDTH, np.float32), EPS)[0]
    assert same_bits(run(found(Head(False), x), x), want)


class Other(torch.nn.Module):
    """A norm in a form of its own."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(x)


def _rms(x: torch.Tensor, *dims: int, keepdim: bool = True) -> torch.Tensor:
    return torch.rsqrt(x.pow(2).mean(dims, keepdim=keepdim) + EPS)


FORMS = {
    "dimensions \\[0, 1\\]": lambda x: x * _rms(x, 0, 1),
    "forms that are known": lambda x: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "mean is of torch.float64": lambda x: x.double() * _rms(x.double(), -1),
    "eps is not given": lambda x: torch.nn.functional.rms_norm(x, (WIDTH,)),
    "forms that are known: x": lambda x: (x + 1) * _rms(x, -1),
    "forms that are known: ": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x[:1, :1]),
}


@pytest.mark.parametrize("reason", FORMS)
def test_what_fits_no_form_stays_and_is_named(reason: str) -> None:
    x = random_activations(4, 5, WIDTH)
    module = Other(FORMS[reason])
    program = found(module, x)
    assert not [name for name in names(program) if "halfbyte" in name]
    [said] = program.report.norms.values()
    assert said.startswith("stays as it is: ") and re.search(reason, said)
    assert same_bits(run(program, x), array(module(tensor(x))))


def test_of_a_layer_norm_only_what_is_an_rms_norm_is_found() -> None:
    def shared(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * _rms(centred, -1)

    def apart(x: torch.Tensor) -> torch.Tensor:  # as Cohere spells it
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * _rms(x - mean, -1)

    x = random_activations(4, 5, WIDTH)
    program = found(Other(shared), x)
    assert [name for name in names(program) if "norm" in name] == ["halfbyte.rms_norm"]
    program = found(Other(apart), x)
    assert not [name for name in names(program) if "norm" in name]
    assert program.report.norms == {}
