"""manifest.json: dataclasses, strict reading and the JSON schema agree."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import halfbyte.runtime.manifest as manifest_module
from halfbyte.errors import CheckpointError
from halfbyte.runtime.manifest import Layer, Manifest

SCHEMA = json.loads(Path(manifest_module.__file__).with_name("manifest.schema.json").read_text())


@pytest.fixture
def content(decoder_bundle: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((decoder_bundle / "manifest.json").read_text())
    loaded["layers"] = [
        {"name": "a.b", "shape": [40, 64], "scheme": "int4", "activations": "int8", "kernel": "w4a8"}
    ]
    return loaded


def test_survives_a_round_trip(content: dict[str, Any]) -> None:
    manifest = Manifest.from_json(content)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert manifest.to_json() == content
    assert manifest.layers == (Layer("a.b", (40, 64), "int4", "int8", "w4a8"),)


def test_written_manifests_conform_to_the_schema(content: dict[str, Any], graph_bundle: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for written in (content, json.loads((graph_bundle / "manifest.json").read_text())):
        jsonschema.Draft202012Validator(SCHEMA).validate(written)


def _put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = content
        for name in parents:
            target = target[int(name) if name.isdigit() else name]
        target[int(last) if last.isdigit() else last] = value

    return change


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        del content[name]

    return change


WRONG = {
    "format": (_put("format", "other"), r"format: unknown format"),
    "no format": (_drop("format"), r"format: missing field"),
    "older": (_put("version", 0), r"version: unknown version"),
    "newer": (_put("version", 2), r"newer halfbyte(.|\n)*pip install --upgrade"),
    "version text": (_put("version", "1"), r"version: wrong type(.|\n)*'1'(.|\n)*an integer"),
    "version true": (_put("version", True), r"version: wrong type"),
    "no programs": (_put("programs", []), r"programs: empty"),
    "no model": (_drop("model"), r"model: missing field"),
    "unknown field": (_put("extra", 1), r"unknown field(.|\n)*extra"),
    "unknown nested field": (_put("model.colour", "red"), r"model: unknown field(.|\n)*colour"),
    "outside": (_put("programs.0.file", "../evil.vmfb"), r"programs\[0\].file: file outside the bundle"),
    "absolute": (_put("parameters.0.file", "/etc/passwd"), r"file outside the bundle"),
    "backslash": (_put("parameters.0.file", "a\\b"), r"file outside the bundle"),
    "drive": (_put("tokenizer.0", "C:x"), r"tokenizer\[0\]: file outside the bundle"),
    "empty name": (_put("programs.0.file", ""), r"empty string"),
    "short hash": (_put("programs.0.sha256", "abc"), r"sha256: malformed(.|\n)*64"),
    "no drivers": (_put("programs.0.drivers", []), r"drivers: empty"),
    "architecture": (_put("programs.0.architecture", "z80"), r"architecture: malformed(.|\n)*x86_64"),
    "negative size": (_put("parameters.0.bytes", -1), r"bytes: negative"),
    "tensor": (_put("parameters.0.tensors.head", 12), r"tensors.head: wrong type(.|\n)*an object"),
    "dtype": (_put("entry_points.forward.inputs.0.dtype", "int64"), r"unknown element type(.|\n)*i64"),
    "negative dimension": (_put("entry_points.forward.inputs.0.shape", [-1]), r"shape\[0\]: negative"),
    "list": (_put("caches", {}), r"caches: wrong type(.|\n)*a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_with_the_field_and_the_schema_agrees(content: dict[str, Any], name: str) -> None:
    change, message = WRONG[name]
    wrong = copy.deepcopy(content)
    change(wrong)
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(wrong)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(wrong)


def test_programs_that_sample_take_settings_and_give_a_token(content: dict[str, Any]) -> None:
    token = {"name": "token", "shape": [1], "dtype": "i64"}
    settings = {"name": "sampling", "shape": [4], "dtype": "f32"}
    for name in ("prefill", "decode"):
        content["entry_points"][name]["inputs"].insert(2, settings)
        content["entry_points"][name]["outputs"].append(token)
    assert Manifest.from_json(content).entry_points["decode"].outputs[1].name == "token"
    content["entry_points"]["decode"]["outputs"].pop()
    with pytest.raises(CheckpointError, match=r"decode.outputs: takes what it samples by and gives no token"):
        Manifest.from_json(content)


def test_refuses_caches_that_contradict_the_entry_points(content: dict[str, Any]) -> None:
    content["caches"].reverse()
    with pytest.raises(CheckpointError, match=r"prefill.inputs: inputs after the second are not the caches"):
        Manifest.from_json(content)
    content["caches"][0]["shape"] = ["S", 4]
    with pytest.raises(CheckpointError, match="cache of varying shape"):
        Manifest.from_json(content)


def test_refuses_folders_without_a_readable_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        Manifest.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        Manifest.load(tmp_path)
    for text in (b"{", b"\xff\xfe", b"[]"):
        (tmp_path / "manifest.json").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"manifest.json: (unreadable manifest|wrong type)"):
            Manifest.load(tmp_path)
