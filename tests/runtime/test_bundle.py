"""Calling the entry points of a bundle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.errors import DeviceError, UsageError
from halfbyte.runtime import load
from halfbyte.runtime.device_array import as_float32
from halfbyte.runtime.manifest import Tensor

TOKENS = [3, 5, 7, 1, 10, 0]


@pytest.mark.parametrize("parameters", ["huge", "mmap"])
@pytest.mark.parametrize(("device", "threads"), [("cpu", None), ("cpu", 1), ("cpu", 2), ("local-task", 1)])
def test_computes_what_numpy_computes(
    decoder_bundle: Path, reference: Any, device: str, threads: int | None, parameters: str
) -> None:
    bundle = load(decoder_bundle, device=device, threads=threads, parameters=parameters)
    for count in (0, 1, 2, len(TOKENS)):
        (logits,) = bundle.call("forward", np.array(TOKENS[:count], np.int64))
        assert logits.dtype == np.float32
        np.testing.assert_array_equal(logits, reference.forward(TOKENS[:count]))


def test_equals_iree_run_module_bit_for_bit(decoder_bundle: Path, tmp_path: Path) -> None:
    (ours,) = load(decoder_bundle).call("forward", np.array(TOKENS, np.int64))
    command = [
        str(Path(sys.executable).with_name("iree-run-module")),
        "--device=local-task",
        f"--module={decoder_bundle / 'model.cpu.vmfb'}",
        f"--parameters=model={decoder_bundle / 'model.n64k8.irpa'}",
        "--function=forward",
        f"--input=6xi64={','.join(map(str, TOKENS))}",
        f"--output=@{tmp_path / 'theirs.npy'}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    theirs = np.load(tmp_path / "theirs.npy")
    assert theirs.dtype == ours.dtype and theirs.tobytes() == ours.tobytes()


@pytest.mark.parametrize(
    ("name", "tokens", "position", "message"),
    [
        ("forward", [3, 99999999], None, r"outside the vocabulary(.|\n)*99999999(.|\n)*0 to 10"),
        ("forward", [-1, 3], None, r"outside the vocabulary(.|\n)*-1(.|\n)*0 to 10"),
        ("prefill", [3, 11], 0, r"outside the vocabulary(.|\n)*11(.|\n)*0 to 10"),
        ("prefill", [3, 5], 15, r"2 tokens from position 15 on(.|\n)*0 to 15"),
        ("decode", [3], 16, r"1 token from position 16 on(.|\n)*0 to 15"),
        ("decode", [3], -1, r"1 token from position -1 on(.|\n)*0 to 15"),
    ],
)
def test_a_decoder_reads_and_writes_nothing_outside_its_memory(
    decoder_bundle: Path, reference: Any, name: str, tokens: list[int], position: int | None, message: str
) -> None:
    """The program would end the process, or compute from what lies beside the table."""
    bundle = load(decoder_bundle)
    caches = [] if position is None else [np.array([position]), *bundle.new_caches()]
    with pytest.raises(UsageError, match=message):
        bundle.call(name, np.array(tokens), *caches)
    (logits,) = bundle.call("forward", np.array([10, 0]))
    np.testing.assert_array_equal(logits, reference.forward([10, 0]))


def test_caches_are_updated_in_place(decoder_bundle: Path, reference: Any) -> None:
    bundle = load(decoder_bundle)
    caches = bundle.new_caches()
    assert [cache.shape for cache in caches] == [(16, 4), (16, 4)]
    assert not any(cache.numpy().any() for cache in caches)
    (logits,) = bundle.call("prefill", np.array([3, 5]), np.array([0]), *caches)
    before = caches[0].numpy()
    np.testing.assert_array_equal(logits, reference.forward([3, 5])[-1])
    (logits,) = bundle.call("decode", np.array([7]), np.array([2]), *caches)
    np.testing.assert_array_equal(logits, reference.forward([3, 5, 7])[-1])
    rows = reference.embedding[[3, 5, 7]]
    np.testing.assert_array_equal(caches[0].numpy()[:4], [*rows, np.zeros(4)])
    np.testing.assert_array_equal(caches[1].numpy()[:4], [*rows**2, np.zeros(4)])
    np.testing.assert_array_equal(before[2], 0)  # what numpy() gave is a copy, not a window


def test_results_are_copies(graph_bundle: Path) -> None:
    bundle = load(graph_bundle)
    x = np.ones((2, 3), np.float32)
    first = bundle.call("affine", x, x)[0]
    first[:] = 9
    assert bundle.call("affine", x, x)[0].max() == 2


def test_carries_all_element_types(graph_bundle: Path) -> None:
    bundle = load(graph_bundle)
    b = np.array([[-0.48, -0.488, -0.49], [np.inf, -0.0, 3e38]], ml_dtypes.bfloat16)
    e = np.array([1, -448, 0.0137, np.nan], ml_dtypes.float8_e4m3fn)
    h, p, i = np.array([0.4999, 65504], np.float16), np.array([True, False, True]), np.array(-5, np.int32)
    raw = (b.view(np.uint16), e.view(np.uint8), h, p, i)
    for given in ((b, e, h, p, i), raw):
        for output, expected in zip(bundle.call("types", *given), raw, strict=True):
            assert output.dtype == expected.dtype and output.shape == expected.shape
            assert output.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(as_float32(raw[0], "bf16"), b.astype(np.float32))


def test_scalars_are_arrays_of_no_dimensions(graph_bundle: Path) -> None:
    (result,) = load(graph_bundle).call("scalar", np.array(41), np.float32(1.5))
    assert (result.dtype, result.shape, result.item()) == (np.dtype(np.int64), (), 42)


def test_outputs_can_stay_on_the_device(graph_bundle: Path) -> None:
    bundle = load(graph_bundle)
    x = np.array([[1, 2, 3]], np.float32)
    total, product = bundle.call_on_device("affine", x, x)
    assert (product.shape, product.dtype) == ((1, 3), "f32")
    assert "1x3xf32" in repr(product)
    np.testing.assert_array_equal(bundle.call("affine", total, product)[0], [[3, 8, 15]])


def _zeros(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((_zeros(2, 3),), r"number of inputs(.|\n)*found: 1(.|\n)*2: affine\(x: Tx3xf32"),
        ((_zeros(2, 3, dtype="f8"), _zeros(2, 3)), r"input x: wrong element type(.|\n)*numpy.float64"),
        ((_zeros(2, 3), _zeros(2, 4)), r"input y: wrong shape(.|\n)*2x4(.|\n)*Tx3"),
        ((_zeros(2, 3), _zeros(4, 3)), r"sizes contradict(.|\n)*T = 4(.|\n)*T = 2"),
        ((_zeros(3), _zeros(1, 3)), r"input x: wrong number of dimensions"),
        (([[1, 2, 3]], _zeros(1, 3)), r"input x: not an array(.|\n)*list"),
    ],
)
def test_inputs_that_do_not_fit_are_named(graph_bundle: Path, inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(graph_bundle).call("affine", *inputs)


def test_device_arrays_are_checked_too(graph_bundle: Path, decoder_bundle: Path) -> None:
    bundle = load(graph_bundle)
    x = bundle.to_device(np.zeros((2, 3), np.float16), "f16")
    with pytest.raises(UsageError, match=r"input x: wrong element type(.|\n)*f16(.|\n)*f32"):
        bundle.call("affine", x, x)
    decoder = load(decoder_bundle)
    zeros = np.zeros((16, 4), np.float32)
    with pytest.raises(UsageError, match=r"input k0: caches are updated in place(.|\n)*new_caches"):
        decoder.call("decode", np.array([1]), np.array([0]), zeros, zeros)


def test_unknown_entry_point(graph_bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"'main'(.|\n)*affine, types, scalar, refuse"):
        load(graph_bundle).call("main")


def test_failures_at_run_time_are_device_errors_and_leave_no_trace(graph_bundle: Path) -> None:
    bundle = load(graph_bundle)
    with pytest.raises(DeviceError, match=r"refuse: the call failed(.|\n)*first element below zero"):
        bundle.call("refuse", np.array([-1, 0], np.int32))
    assert bundle.call("refuse", np.array([1, 0], np.int32))[0].tolist() == [1, 0]


def test_a_nan_in_between_does_not_change_later_calls(graph_bundle: Path) -> None:
    bundle = load(graph_bundle)
    x = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    first = bundle.call("affine", x, x)
    assert np.isnan(bundle.call("affine", np.full_like(x, np.nan), x)[0]).all()
    for before, after in zip(first, bundle.call("affine", x, x), strict=True):
        assert before.tobytes() == after.tobytes()


def test_describes_itself(decoder_bundle: Path) -> None:
    text = load(decoder_bundle, threads=2).describe()
    assert "tiny: llama, f32" in text
    assert "device: local-task, 2 threads" in text
    assert "decode(token: 1xi64, position: 1xi64, 2 caches) -> logits: 11xf32" in text


def test_tensor_spells_itself_as_mlir_does() -> None:
    assert str(Tensor("k", (3, "S", 64), "bf16")) == "k: 3xSx64xbf16"
