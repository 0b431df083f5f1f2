"""Graphs of one's own: rewritten, compiled, run by the runtime and by iree-run-module."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from dequantizing_models import AwqLinear, GptqLinear, GroupedLinear, exact_output
from numpy_twin import linear, same_bits
from random_layers import random_activations, random_weight
from rewritten_graphs import Named, export

import halfbyte
from halfbyte.errors import UnsupportedLayerError, UsageError

GATE, UP, DOWN = (
    random_weight(1, 96, 64, 32),
    random_weight(2, 96, 64, 32),
    random_weight(3, 64, 96, 32, bias=True),
)
ORDER = np.random.default_rng(7).permutation(64)


class _Mlp(torch.nn.Module):
    """Logs, returns a dictionary with None in it; its weights are packed in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = GptqLinear(GATE, order=ORDER), AwqLinear(UP)
        self.down_proj = GroupedLinear(DOWN)
        self.head = torch.nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        import logging

        logging.getLogger("model").warning("an old checkpoint")
        hidden = self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))
        return {"hidden": hidden, "attentions": None, "logits": self.head(hidden)}


def reference(mlp: _Mlp, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gate, up = linear(x[:, ORDER], GATE, 3), linear(x, UP, 3)
    inner = np.maximum(gate, 0) * up
    hidden = linear(inner, DOWN, 3)
    weight, bias = (value.detach().numpy().astype(np.float64) for value in (mlp.head.weight, mlp.head.bias))
    return hidden, hidden @ weight.T + bias


@pytest.fixture(scope="module")
def mlp() -> _Mlp:
    torch.manual_seed(0)
    return _Mlp().eval()


@pytest.fixture(scope="module")
def bundle(mlp: _Mlp, tmp_path_factory: pytest.TempPathFactory) -> halfbyte.Compiled:
    program = export(mlp, random_activations(1, 5, 64))
    return halfbyte.compile(program, tmp_path_factory.mktemp("graph") / "mlp")


def test_a_compiled_graph_computes_what_it_did(mlp: _Mlp, bundle: halfbyte.Compiled) -> None:
    loaded = halfbyte.load(bundle.path)
    for rows in (0, 1, 2, 9):
        x = random_activations(rows, max(rows, 1), 64)[:rows]
        hidden, logits = loaded.call("forward", x)
        want, head = reference(mlp, x)
        np.testing.assert_allclose(hidden, want, rtol=1e-5, atol=1e-4 * max(np.abs(want).max(initial=0), 1))
        np.testing.assert_allclose(logits, head, rtol=1e-4, atol=1e-4 * max(np.abs(head).max(initial=0), 1))
        with torch.no_grad():
            plain = mlp(torch.from_numpy(x))["hidden"]
        assert plain is not None
        np.testing.assert_allclose(
            hidden, plain.numpy(), rtol=1e-4, atol=1e-4 * max(np.abs(want).max(initial=0), 1)
        )


def test_the_report_of_a_graph(bundle: halfbyte.Compiled) -> None:
    rows = {row["name"]: row for row in bundle.report["layers"]}
    assert {name: row["scheme"].split(",")[0] for name, row in rows.items()} == {
        "gate_proj": "int4 integer",
        "up_proj": "int4 integer",
        "down_proj": "int4 integer",
        "head": "float",
    }
    assert "act-order" in rows["gate_proj"]["scheme"]
    assert "w4_planes3" in rows["up_proj"]["kernel"] and rows["head"]["kernel"] == "IREE's own code"
    assert [row["name"] for row in bundle.report["passes"]] == [
        "unwrap-subclasses",
        *("find-dequantized-linears", "merge-linears", "find-attention", "find-norms"),
    ]
    [archive] = bundle.manifest.parameters
    assert {key for key in archive.tensors if key.endswith(".codes")} == {
        *("gate_proj.codes", "up_proj.codes", "down_proj.codes")
    }
    assert not [key for key in archive.tensors if "qweight" in key or "g_idx" in key]


def test_iree_run_module_runs_a_graph(bundle: halfbyte.Compiled, tmp_path: Path) -> None:
    x = random_activations(4, 3, 64)
    np.save(tmp_path / "x.npy", x)
    tool = Path(sysconfig.get_path("scripts")) / "iree-run-module"
    command = [tool, f"--input=@{tmp_path / 'x.npy'}", "--flagfile=forward.flags"]
    command += [f"--output=@{tmp_path / 'hidden.npy'}", f"--output=@{tmp_path / 'logits.npy'}"]
    done = subprocess.run(command, cwd=bundle.path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, want in zip(("hidden", "logits"), halfbyte.load(bundle.path).call("forward", x), strict=True):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), want)


def test_a_rewritten_module_compiles_with_int8_activations(tmp_path: Path) -> None:
    weight = random_weight(5, 24, 64, 16, bias=True)
    module = Named(layer=GptqLinear(weight, spelling="linear"))
    rows = torch.export.Dim("T", min=1, max=64)
    example = (torch.zeros(5, 64),)
    program = halfbyte.rewrite(module, example, dynamic_shapes=({0: rows},), activations="int8", min_tokens=4)
    made = halfbyte.compile(program, tmp_path / "out")
    loaded = halfbyte.load(made.path)
    x = random_activations(1, 6, 64)
    assert same_bits(loaded.call("forward", x)[0], linear(x, weight, 1))
    assert same_bits(loaded.call("forward", x[:3])[0], linear(x[:3], weight, 3))
    eager = program.entries["forward"].module()(torch.from_numpy(x)).numpy()
    assert same_bits(loaded.call("forward", x)[0], eager)
    assert [layer.activations for layer in made.manifest.layers] == ["int8"]
    assert "layer.codes" in json.loads((made.path / "manifest.json").read_text())["parameters"][0]["tensors"]


def test_graphs_with_layers_that_are_refused(tmp_path: Path) -> None:
    """Such a layer is computed as the graph says, if that is asked for."""
    wide = random_weight(7, 8, 60, 4)
    x = random_activations(1, 5, 60)
    bad = Named(layer=GroupedLinear(wide))
    with pytest.raises(UnsupportedLayerError, match="layer: this layer cannot be compiled as asked"):
        halfbyte.compile(export(bad, x), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    options = halfbyte.CompileOptions(on_unsupported="float")
    loaded = halfbyte.load(halfbyte.compile(export(bad, x), tmp_path / "out", options).path)
    want = exact_output(x, wide)
    np.testing.assert_allclose(loaded.call("forward", x)[0], want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_packed_words_that_stay_in_the_graph(tmp_path: Path) -> None:
    """A GPTQ layer with groups of 4 keeps its shifts and masks, and is still right."""
    weight = random_weight(8, 16, 64, 4)
    x = random_activations(1, 5, 64)
    options = halfbyte.CompileOptions(on_unsupported="float")
    made = halfbyte.compile(export(Named(layer=GptqLinear(weight)), x), tmp_path / "out", options)
    assert [layer.scheme for layer in made.manifest.layers] == ["float"]
    [got] = halfbyte.load(made.path).call("forward", x)
    want = exact_output(x, weight)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_activations_by_layer_are_for_checkpoints(mlp: _Mlp, tmp_path: Path) -> None:
    options = halfbyte.CompileOptions(layers=("*=int8",))
    with pytest.raises(UsageError, match="cannot be chosen by name"):
        halfbyte.compile(export(mlp, random_activations(1, 5, 64)), tmp_path / "out", options)
