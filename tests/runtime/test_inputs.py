"""The command line's spelling of inputs and outputs, against iree-run-module's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.errors import UsageError
from halfbyte.runtime.element_types import ELEMENT_TYPES
from halfbyte.runtime.inputs import parse_input
from halfbyte.runtime.outputs import format_output, write_output


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("2x3xf32=1,2,3,4,5,6", "f32", np.array([[1, 2, 3], [4, 5, 6]], np.float32)),
        ("2x3xf32=1 2 3 4 5 6", "f32", np.array([[1, 2, 3], [4, 5, 6]], np.float32)),
        ("2x3xf32=[1 2 3][4 5 6]", "f32", np.array([[1, 2, 3], [4, 5, 6]], np.float32)),
        ("2x3xf32=[[1, 2, 3], [4, 5, 6]]", "f32", np.array([[1, 2, 3], [4, 5, 6]], np.float32)),
        ("4xi64=7", "i64", np.full(4, 7, np.int64)),
        ("4xi64", "i64", np.zeros(4, np.int64)),
        ("2xsi64=-1,1", "i64", np.array([-1, 1])),
        ("2xi64=-1,1", "si64", np.array([-1, 1])),
        ("i32=3", "i32", np.array(3, np.int32)),
        ("3", "i32", np.array(3, np.int32)),
        ("-3.5e2", "f16", np.array(-350, np.float16)),
        ("inf", "f32", np.array(np.inf, np.float32)),
        ("0x4xf32", "f32", np.zeros((0, 4), np.float32)),
        ("0xi64=", "i64", np.zeros(0, np.int64)),
        ("2xui8=255,0x10", "ui8", np.array([255, 16], np.uint8)),
        ("3xi1=1,0,true", "i1", np.array([True, False, True])),
        ("2xi1=false", "i1", np.array([False, False])),
        ("3xf32=nan,-inf,1e99", "f32", np.array([np.nan, -np.inf, np.inf], np.float32)),
        ("2xbf16=1.01,3e38", "bf16", np.array([1.01, 3e38], ml_dtypes.bfloat16).view(np.uint16)),
        ("2xf8E4M3FN=0.3,-448", "f8E4M3FN", np.array([0.3, -448], ml_dtypes.float8_e4m3fn).view(np.uint8)),
    ],
)
def test_parses(text: str, dtype: str, expected: np.ndarray[Any, Any]) -> None:
    found = parse_input(text, dtype)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("text", "dtype", "message"),
    [
        ("", "f32", "malformed input"),
        ("f32", "f32", "malformed input"),
        ("2xf33=1", "f32", "malformed input"),
        ("2x=1", "f32", "malformed input"),
        ("-1xf32", "f32", "malformed input|not f32"),
        ("hello", "f32", "malformed input"),
        ("2xi4=1,2", "i8", "malformed input"),
        ("2xi32=1,2", "i64", r"wrong element type(.|\n)*i32(.|\n)*i64"),
        ("2xui8=1,2", "i8", "wrong element type"),
        ("2xf32=1,2,3", "f32", r"wrong number of values(.|\n)*3(.|\n)*2, or one"),
        ("3xf32=1,2", "f32", "wrong number of values"),
        ("2xf32=1,x", "f32", r"not f32(.|\n)*'x'"),
        ("2xi8=300,1", "i8", "not i8"),
        ("2xi64=1.5", "i64", "not i64"),
        ("2xi1=maybe", "i1", "not i1"),
        ("@none.npy", "f32", "unreadable file"),
        ("@none.bin", "f32", "a file without a type"),
        ("2xf32=@none.bin", "f32", "unreadable file"),
        ("2xf32=@none.npy", "f32", "shape and .npy together"),
    ],
)
def test_refuses(text: str, dtype: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_input(text, dtype)


def test_shows_the_grammar() -> None:
    with pytest.raises(UsageError, match=r"accepted: 2x3xf32=1,2,3(.|\n)*@file.npy"):
        parse_input("what?", "f32")


def test_reads_npy(tmp_path: Path) -> None:
    for array, dtype in (
        (np.arange(6, dtype=np.float32).reshape(2, 3), "f32"),
        (np.array(3), "i64"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), "i64"),
        (np.arange(4, dtype=np.uint16), "bf16"),  # bits
    ):
        np.save(tmp_path / "a.npy", array)
        found = parse_input(f"@{tmp_path / 'a.npy'}", dtype)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    with pytest.raises(UsageError, match=r"wrong element type(.|\n)*numpy.uint16"):
        parse_input(f"@{tmp_path / 'a.npy'}", "f32")
    np.save(tmp_path / "a.npy", np.zeros(3, ml_dtypes.bfloat16))
    with pytest.raises(UsageError, match=r"cannot hold bf16(.|\n)*@file.bin"):
        parse_input(f"@{tmp_path / 'a.npy'}", "bf16")
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(UsageError, match="unreadable file"):
        parse_input(f"@{tmp_path / 'a.npy'}", "f32")


def test_bf16_goes_through_raw_files(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    bits = array.view(np.uint16)
    path = tmp_path / "a.bin"
    assert write_output(f"@{path}", bits, "bf16") is None
    assert path.read_bytes() == array.tobytes()
    np.testing.assert_array_equal(parse_input(f"3x5xbf16=@{path}", "bf16"), bits)
    with pytest.raises(UsageError, match=r"another size(.|\n)*30 bytes(.|\n)*32 bytes"):
        parse_input(f"4x4xbf16=@{path}", "bf16")


def test_writes_and_appends(tmp_path: Path) -> None:
    array = np.arange(3, dtype=np.float32)
    path = tmp_path / "a.npy"
    for text in ("@", "+"):
        assert write_output(f"{text}{path}", array, "f32") is None
    with path.open("rb") as file:
        assert np.load(file).tolist() == np.load(file).tolist() == [0, 1, 2]
    write_output(f"@{path}", array[:1], "f32")
    assert np.load(path).tolist() == [0]
    assert write_output("", array, "f32") is None
    for text in ("a.npy", "@a.txt", "@"):
        with pytest.raises(UsageError, match="malformed output"):
            write_output(text, array, "f32")
    with pytest.raises(UsageError, match="cannot write"):
        write_output(f"@{tmp_path / 'none' / 'a.npy'}", array, "f32")


@pytest.mark.parametrize(
    ("array", "dtype", "text"),
    [
        (np.array([[1.5, 1e10, 1 / 3], [np.nan, np.inf, -0.0]], np.float32), "f32",
         "2x3xf32=[1.5 1E+10 0.333333][NAN INF -0]"),
        (np.array(3, np.int32), "i32", "i32=3"),
        (np.zeros((0, 4), np.float32), "f32", "0x4xf32="),
        (np.arange(8, dtype=np.float16).reshape(2, 2, 2), "f16", "2x2x2xf16=[[0 1][2 3]][[4 5][6 7]]"),
        (np.array([True, False]), "i1", "2xi1=01 00"),
        (np.array([1.01, 3e38], ml_dtypes.bfloat16).view(np.uint16), "bf16", "2xbf16=1.00781 3.00406E+38"),
    ],
)  # fmt: skip
def test_prints_as_iree_run_module_does(array: np.ndarray[Any, Any], dtype: str, text: str) -> None:
    assert format_output(array, dtype) == text


def test_leaves_out_what_is_too_much() -> None:
    assert format_output(np.full(2000, 5, np.int8), "i8", 4) == "2000xi8=5 5 5 5..."
    eight = np.arange(8).reshape(2, 2, 2)
    assert format_output(eight, "i64", 3) == "2x2x2xi64=[[0 1][2...]][[...][...]]"


def test_prints_what_iree_run_module_prints(decoder_bundle: Path, tmp_path: Path) -> None:
    """The same words for the same call, also for more elements than are shown."""
    from halfbyte.runtime import load

    tokens = [1, 2, 3] * 40
    (logits,) = load(decoder_bundle).call("forward", np.array(tokens))
    command = [
        str(Path(sys.executable).with_name("iree-run-module")),
        f"--module={decoder_bundle / 'model.cpu.vmfb'}",
        f"--parameters=model={decoder_bundle / 'model.n64k8.irpa'}",
        "--device=local-sync",
        "--function=forward",
        f"--input={len(tokens)}xi64={' '.join(map(str, tokens))}",
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert format_output(logits, "f32") == printed.splitlines()[-1]


def test_every_element_type_has_a_value_type() -> None:
    for element in ELEMENT_TYPES.values():
        assert element.values.itemsize == element.carrier.itemsize == element.bytes
        assert (element.values == element.carrier) != element.bits_only
