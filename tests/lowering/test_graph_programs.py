"""Graphs of many kinds as entry points of one program: what IREE or the importer is known to get wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy_twin import TYPES, Array, linear, quantized_per_token, same_bits
from random_layers import random_activations, random_weight, telling_rows
from torch.export import Dim, ExportedProgram
from torch_bridge import array, quant_tensor, tensor

import halfbyte
from halfbyte.passes.program import Program
from halfbyte.passes.quant_linear import QuantLinear
from halfbyte.passes.scheme import Activations
from halfbyte.runtime import Bundle

T = Dim("T", min=2, max=4096)
WEIGHT = random_weight(1, 20, 40, 8, "integer", bias=True)


class Function(torch.nn.Module):
    """A module of a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def export(function: Any, *inputs: torch.Tensor, dynamic: Any = None) -> ExportedProgram:
    wrapped = not isinstance(function, torch.nn.Module)
    module = Function(function) if wrapped else function
    shapes = (dynamic,) if wrapped and dynamic is not None else dynamic
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


def quant_linear(activations: Activations) -> QuantLinear:
    source = quant_tensor("layer", WEIGHT)
    module = QuantLinear("layer", source.scheme, source.shape, bias=True, activations=activations, digits=3)
    return module.fill(source, tensor(WEIGHT.bias))


class _Linear(torch.nn.Module):
    def __init__(self, activations: Activations) -> None:
        super().__init__()
        self.layer = quant_linear(activations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def two_topk(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = torch.topk(x, 3)
    second = torch.topk(-x, 2)
    return first.values, first.indices, second.values, second.indices


def appended(cache: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return torch.ops.halfbyte.cache_append(cache, rows, position).float().sum(-1)


def both_caches(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> Any:
    keys = torch.ops.halfbyte.cache_append(k, rows, position)
    values = torch.ops.halfbyte.cache_append(v, rows * 2, position)
    return keys.sum((0, 2)), values.sum((0, 2))


class _Tables(torch.nn.Module):
    """State of every dtype, a boolean among them, and two names of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("index", torch.tensor([2, 0, 1]))
        self.register_buffer("wide", torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
        self.register_buffer("narrow", torch.tensor([1.5, -2.5, 3.5], dtype=torch.bfloat16))
        self.register_buffer("sixteen", torch.tensor([1.25, 2.25, 3.25], dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.where(self.mask, x[:, self.index], -x)
        return (
            y + self.narrow.float() + self.sixteen.float() + self.wide.float() + torch.tensor([1.0, 2.0, 3.0])
        )


def entries() -> dict[str, ExportedProgram]:
    x, words = torch.randn(5, 7), torch.tensor([[-19088744, 5]], dtype=torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    position = torch.zeros(1, dtype=torch.int64)
    out = {
        "int8": export(_Linear(Activations.INT8), torch.randn(5, 40), dynamic=({0: T},)),
        "planes": export(_Linear(Activations.NONE), torch.randn(5, 40), dynamic=({0: T},)),
        "vector": export(_Linear(Activations.NONE), torch.randn(40)),
        "one_row": export(_Linear(Activations.INT8), torch.randn(1, 40)),
        "batches": export(_Linear(Activations.INT8), torch.randn(3, 5, 40), dynamic=({1: T},)),
        "still": export(_Linear(Activations.INT8), torch.randn(2, 3, 40)),
        "topk": export(two_topk, x, dynamic=({0: T},)),
        "double": export(lambda a, s: a * s, torch.randn(4), torch.tensor(3.0, dtype=torch.float64)),
        "squeezed": export(lambda a: torch.squeeze(a, (0, 2)), torch.randn(1, 4, 1)),
        "copied": export(
            lambda a, b, i: a.index_copy(0, i, b), torch.randn(4, 3), torch.randn(2, 3), torch.tensor([2, 0])
        ),
        "shifted": export(lambda q: (q[..., None] >> shifts) & 15, words),
        "bytes": export(
            lambda a, b: (a >> 4, b >> 4),
            torch.tensor([-128], dtype=torch.int8),
            torch.tensor([128], dtype=torch.uint8),
        ),
        "activations": export(activations, torch.randn(9), dynamic=({0: T},)),
        "identity": export(lambda a: a + 0, torch.zeros(3, 5, dtype=torch.bfloat16)),
        "tables": export(_Tables(), torch.randn(2, 3), dynamic=({0: T},)),
        "both": export(
            both_caches, torch.zeros(2, 9, 4), torch.zeros(2, 9, 4), torch.randn(2, 2, 4), position
        ),
        "summed": export(lambda a: {"sum": a.sum(), "same": (a, None)}, torch.randn(3)),
    }
    for name, kind in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
        data = torch.zeros(2, 9, 12, dtype=kind)
        rows = torch.zeros(2, 3, 12, dtype=kind)
        out[f"append_{name}"] = export(appended, data, rows, position, dynamic=(None, {1: T}, None))
        quantize = torch.ops.halfbyte.quantize_per_token.default
        out[f"quantize_{name}"] = export(quantize, torch.zeros(5, 33, dtype=kind), dynamic=({0: T},))
    out["quantize_3d"] = export(
        torch.ops.halfbyte.quantize_per_token.default, torch.zeros(2, 5, 24), dynamic=({1: T},)
    )
    return out


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, portable: str) -> Bundle:
    from halfbyte.passes.program import LayerSource

    source, bias = quant_tensor("layer", WEIGHT), tensor(WEIGHT.bias)
    assert bias is not None
    program = Program(entries(), {"layer": LayerSource(lambda: source, lambda: bias, ("layer",))})
    options = halfbyte.CompileOptions(cpu=portable)
    return halfbyte.load(
        halfbyte.compile(program, tmp_path_factory.mktemp("graphs") / "bundle", options).path
    )


def call(bundle: Bundle, name: str, *inputs: Any) -> list[Array]:
    """Results with bfloat16 as ml_dtypes' type."""
    carriers = [
        value.view(np.uint16)
        if isinstance(value, np.ndarray) and value.dtype == ml_dtypes.bfloat16
        else value
        for value in inputs
    ]
    got = bundle.call(name, *carriers)
    kinds = [tensor.dtype for tensor in bundle.entry_points[name].outputs]
    return [y.view(ml_dtypes.bfloat16) if kind == "bf16" else y for y, kind in zip(got, kinds, strict=True)]


# ---------------------------------------------------------------- linears of every rank


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33, 513])
@pytest.mark.parametrize(("name", "digits"), [("int8", 1), ("planes", 3)])
def test_linears_of_any_number_of_rows(bundle: Bundle, name: str, digits: int, rows: int) -> None:
    """Cases 84 and 95: external parameters and a varying dimension, no rows and one among them."""
    x = random_activations(1, 513, 40)[:rows]
    [got] = call(bundle, name, x)
    assert same_bits(got, linear(x, WEIGHT, digits))


def test_linears_of_other_ranks(bundle: Bundle) -> None:
    """Case 97: no leading dimension, one fixed row, several leading dimensions."""
    x = random_activations(2, 15, 40)
    one, many = linear(x, WEIGHT, 3), linear(x, WEIGHT, 1)
    assert same_bits(call(bundle, "vector", x[3])[0], one[3])
    assert same_bits(call(bundle, "one_row", x[4:5])[0], many[4:5])
    for tokens in (1, 2, 5):
        part = x[: 3 * tokens].reshape(3, tokens, 40)
        assert same_bits(call(bundle, "batches", part)[0].reshape(-1, 20), many[: 3 * tokens])
    assert same_bits(call(bundle, "still", x[:6].reshape(2, 3, 40))[0].reshape(-1, 20), many[:6])


def test_one_weight_of_many_entry_points_is_stored_once(bundle: Bundle) -> None:
    keys = [key for key in bundle.manifest.parameters[0].tensors if "codes" in key]
    assert keys == ["layer.codes"]


@pytest.mark.parametrize("io", TYPES)
def test_quantize_per_token_by_itself(bundle: Bundle, io: str) -> None:
    x = np.concatenate([random_activations(3, 7, 33, io), telling_rows(33, io)])
    x = x[np.isfinite(x.astype(np.float32)).all(1)]
    for rows in (0, 1, len(x)):
        codes, scale = call(bundle, f"quantize_{io}", x[:rows])
        want_codes, want_scale = quantized_per_token(x[:rows])
        np.testing.assert_array_equal(codes, want_codes)
        assert same_bits(scale, want_scale)


@pytest.mark.parametrize("io", TYPES)
def test_rows_that_hold_no_numbers_have_codes_0(bundle: Bundle, io: str) -> None:
    x = telling_rows(33, io)
    codes, scale = call(bundle, f"quantize_{io}", x)
    want_codes, want_scale = quantized_per_token(x)
    assert same_bits(scale, want_scale)
    np.testing.assert_array_equal(codes, want_codes)


def test_quantize_per_token_of_three_dimensions(bundle: Bundle) -> None:
    x = random_activations(3, 6, 24)
    codes, scale = call(bundle, "quantize_3d", x.reshape(2, 3, 24))
    want_codes, want_scale = quantized_per_token(x)
    np.testing.assert_array_equal(codes, want_codes.reshape(2, 3, 24))
    assert same_bits(scale, want_scale.reshape(2, 3))


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("io", TYPES)
@pytest.mark.parametrize(
    ("position", "count"), [(0, 2), (3, 4), (7, 2), (6, 5), (9, 3), (0, 9), (2, 1), (4, 0)]
)
def test_rows_are_appended_in_place(bundle: Bundle, io: str, position: int, count: int) -> None:
    """The caller's buffer changes where the rows go and nowhere else; what is behind the end is dropped."""
    random = np.random.default_rng(position)
    cache = random.normal(size=(2, 9, 12)).astype(TYPES[io])
    rows = random.normal(size=(2, count, 12)).astype(TYPES[io])
    want = cache.copy()
    fits = max(0, min(count, 9 - position))
    want[:, position : position + fits] = rows[:, :fits]
    carrier = cache.view(np.uint16) if io == "bf16" else cache
    held = bundle.to_device(carrier, io)
    given = rows.view(np.uint16) if io == "bf16" else rows
    [total] = bundle.call(f"append_{io}", held, given, np.array([position], np.int64))
    got = held.numpy()
    np.testing.assert_array_equal(got, want.view(np.uint16) if io == "bf16" else want)
    np.testing.assert_allclose(total, want.astype(np.float32).sum(-1), rtol=1e-4, atol=1e-4)


def test_equal_caches_stay_two(bundle: Bundle) -> None:
    """IREE 3.13 fuses two globals that begin with the same values; caches are arguments."""
    k, v = (bundle.to_device(np.zeros((2, 9, 4), np.float32), "f32") for _ in range(2))
    rows = random_activations(1, 4, 4).reshape(2, 2, 4)
    keys, values = bundle.call("both", k, v, rows, np.array([5], np.int64))
    np.testing.assert_allclose(values, 2 * keys, rtol=1e-6)
    assert np.abs(keys).max() > 0
    np.testing.assert_array_equal(k.numpy()[:, 5:7], rows)
    np.testing.assert_array_equal(v.numpy()[:, 5:7], 2 * rows)


# ---------------------------------------------------------------- known traps


@pytest.mark.parametrize("rows", [2, 5, 40])
def test_two_topk_in_one_program(bundle: Bundle, rows: int) -> None:
    """In IREE 3.13 the second of two topk is wrong; they are taken apart before."""
    x = np.random.default_rng(rows).permutation(rows * 7).reshape(rows, 7).astype(np.float32)
    got = call(bundle, "topk", x)
    want = [array(value) for value in two_topk(torch.from_numpy(x))]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def activations(x: torch.Tensor) -> list[torch.Tensor]:
    gelu = torch.nn.functional.gelu
    return [gelu(x), gelu(x, approximate="tanh"), torch.tanh(x), torch.nn.functional.silu(x)]


def test_activation_functions(bundle: Bundle) -> None:
    """torch-mlir's own gelu by tanh is off by 5e-5."""
    x = np.linspace(-9, 9, 3001).astype(np.float32)
    wanted = activations(torch.from_numpy(x).double())
    for got, want in zip(call(bundle, "activations", x), wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1.5e-6)


def test_double_precision_inputs(bundle: Bundle) -> None:
    """By default IREE 3.13 demotes f64 inside a program but not at its border."""
    x = np.array([1, 2, 3, 4], np.float32)
    [got] = call(bundle, "double", x, np.array(3.0))
    np.testing.assert_array_equal(got, 3 * x)


def test_squeeze_and_index_copy(bundle: Bundle) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4, 1)
    np.testing.assert_array_equal(call(bundle, "squeezed", x)[0], x[0, :, 0])
    base, new = np.zeros((4, 3), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    [got] = call(bundle, "copied", base, new, np.array([3, 1]))
    want = base.copy()
    want[[3, 1]] = new
    np.testing.assert_array_equal(got, want)


def test_right_shifts_of_signed_and_unsigned_words(bundle: Bundle) -> None:
    """Case 4."""
    words = np.array([[0xFEDCBA98, 0x01234567]], np.uint32).view(np.int32)
    [got] = call(bundle, "shifted", words)
    np.testing.assert_array_equal(got, [[[8, 9, 10, 11, 12, 13, 14, 15], [7, 6, 5, 4, 3, 2, 1, 0]]])
    signed, unsigned = call(bundle, "bytes", np.array([-128], np.int8), np.array([128], np.uint8))
    np.testing.assert_array_equal(signed, [-8])
    np.testing.assert_array_equal(unsigned, [8])


def test_bfloat16_passes_through_exactly(bundle: Bundle) -> None:
    """Cases 46 and 114."""
    x = np.linspace(-0.49, 0.49, 15).reshape(3, 5).astype(ml_dtypes.bfloat16)
    x[0, :3] = [-0.48, -0.488, -0.49]
    [got] = call(bundle, "identity", x)
    np.testing.assert_array_equal(got.view(np.uint16), x.view(np.uint16))


def test_state_of_every_dtype(bundle: Bundle) -> None:
    x = np.array([[1, 2, 3], [40, 50, 60]], np.float32)
    want = np.where([True, False, True], x[:, [2, 0, 1]], -x)
    want = want + np.array([1.5, -2.5, 3.5]) + [1.25, 2.25, 3.25] + np.array([1.1, 2.2, 3.3])
    np.testing.assert_allclose(call(bundle, "tables", x)[0], want, rtol=1e-6)


def test_structures_become_numbered_results(bundle: Bundle) -> None:
    entry = bundle.entry_points["summed"]
    assert [output.shape for output in entry.outputs] == [(), (3,)]
    x = np.array([1, 2, 4], np.float32)
    total, same = call(bundle, "summed", x)
    assert total == 7
    np.testing.assert_array_equal(same, x)


def test_signatures(bundle: Bundle) -> None:
    """Case 113: no argument and no result of four bits; varying sizes are named."""
    found = {
        name: (list(map(str, e.inputs)), list(map(str, e.outputs))) for name, e in bundle.entry_points.items()
    }
    assert found["int8"] == (["x: Tx40xf32"], ["output0: Tx20xf32"])
    assert found["append_bf16"][1] == ["output0: 2x9xf32"]
    assert [text.split(": ")[1] for text in found["both"][0]] == [
        "2x9x4xf32",
        "2x9x4xf32",
        "2x2x4xf32",
        "1xi64",
    ]
    kinds = {t.dtype for e in bundle.entry_points.values() for t in (*e.inputs, *e.outputs)}
    assert kinds <= {"f64", "f32", "f16", "bf16", "i64", "i32", "i8", "ui8"}


def test_the_report_names_the_layer(bundle: Bundle) -> None:
    report = json.loads((bundle.folder / "report.json").read_text())
    assert set(report) >= {"layers", "refusals", "warnings", "passes", "options", "seconds"}


# ---------------------------------------------------------------- what cannot be lowered


class _Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


def test_buffers_that_a_graph_writes_are_refused(tmp_path: Path) -> None:
    program = torch.export.export(_Counter(), (torch.zeros(3),), strict=False)
    with pytest.raises(halfbyte.HalfbyteError, match="the graph writes to a buffer of its own") as error:
        halfbyte.compile(program, tmp_path / "out")
    assert error.value.exit_code == 4
    assert "count" in str(error.value) and "cache_append" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_codes_that_are_no_state_are_refused(tmp_path: Path) -> None:
    def function(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.ops.halfbyte.linear(x, codes, scale, None, None, None, 4, 8, "int8", 3, 0)

    inputs = (torch.zeros(2, 16), torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 2))
    with pytest.raises(halfbyte.HalfbyteError, match="must be state of the program"):
        halfbyte.compile(export(function, *inputs), tmp_path / "out")
