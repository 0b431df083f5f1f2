"""Makes a `Manifest` of parsed JSON, checking every field."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.runtime.element_types import ELEMENT_TYPES
from halfbyte.runtime.json_fields import Fields, array, mapping, natural, text
from halfbyte.runtime.manifest import (
    FORMAT,
    SAMPLING,
    VERSION,
    EntryPoint,
    Layer,
    Manifest,
    Model,
    ParameterArchive,
    ParameterTensor,
    Program,
    Tensor,
)


def read_manifest(content: Any, where: str) -> Manifest:
    """See `Manifest.from_json`."""
    with Fields(content, where) as fields:
        _check_version(fields, where)
        manifest = Manifest(
            model=fields.take("model", _model),
            programs=fields.take("programs", array(_program)),
            parameters=fields.take("parameters", array(_archive)),
            entry_points=fields.take("entry_points", mapping(_entry_point)),
            caches=fields.take_optional("caches", array(_tensor)) or (),
            layers=fields.take_optional("layers", array(_layer)) or (),
            tokenizer=fields.take_optional("tokenizer", array(_file)) or (),
            versions=fields.take_optional("versions", mapping(text)) or {},
        )
    for name, value in (("programs", manifest.programs), ("entry_points", manifest.entry_points)):
        if not value:
            raise CheckpointError("empty", where=f"{where}.{name}", accepted="at least one")
    _check_caches(manifest, where)
    return manifest


def _check_version(fields: Fields, where: str) -> None:
    kind = fields.take("format", text)
    if kind != FORMAT:
        raise CheckpointError(
            "unknown format", where=f"{where}.format", found=repr(kind), accepted=repr(FORMAT)
        )
    version = fields.take("version", natural)
    if version != VERSION:
        newer = version > VERSION
        raise CheckpointError(
            "bundle written by a newer halfbyte" if newer else "unknown version",
            where=f"{where}.version",
            found=str(version),
            accepted=str(VERSION),
            advice="pip install --upgrade halfbyte" if newer else "compile the model again",
        )


def _check_caches(manifest: Manifest, where: str) -> None:
    """Caches have fixed shapes; prefill and decode take them last, after `SAMPLING` where they give a token too."""
    for cache in manifest.caches:
        if not all(isinstance(size, int) for size in cache.shape):
            raise CheckpointError("cache of varying shape", where=f"{where}.caches", found=str(cache))
    for name in ("prefill", "decode"):
        entry = manifest.entry_points.get(name)
        if not manifest.caches or entry is None:
            continue
        samples = SAMPLING in entry.inputs
        if samples and entry.outputs[1:] != (Tensor("token", (1,), "i64"),):
            raise CheckpointError(
                "takes what it samples by and gives no token", where=f"{where}.entry_points.{name}.outputs"
            )
        if entry.inputs[2:] != (*[SAMPLING] * samples, *manifest.caches):
            raise CheckpointError(
                "inputs after the second are not the caches", where=f"{where}.entry_points.{name}.inputs"
            )


def _matching(pattern: str, accepted: str) -> Callable[[Any, str], str]:
    expression = re.compile(pattern)

    def read(value: Any, where: str) -> str:
        string = text(value, where)
        if not expression.fullmatch(string):
            raise CheckpointError("malformed", where=where, found=repr(string), accepted=accepted)
        return string

    return read


_sha256 = _matching("[0-9a-f]{64}", "64 lower-case hexadecimal digits")
_architecture = _matching("x86_64|aarch64|riscv_64", "x86_64, aarch64 or riscv_64")


def _file(value: Any, where: str) -> str:
    """A name inside the bundle: relative, without .. and in POSIX spelling."""
    string = text(value, where)
    path = PurePosixPath(string)
    if path.is_absolute() or ".." in path.parts or "\\" in string or re.match("[A-Za-z]:", string):
        raise CheckpointError(
            "file outside the bundle", where=where, found=repr(string), accepted="a relative name without .."
        )
    return string


def _dtype(value: Any, where: str) -> str:
    string = text(value, where)
    if string not in ELEMENT_TYPES:
        raise CheckpointError(
            "unknown element type", where=where, found=repr(string), accepted=", ".join(ELEMENT_TYPES)
        )
    return string


def _dimension(value: Any, where: str) -> int | str:
    return text(value, where) if isinstance(value, str) else natural(value, where)


def _model(value: Any, where: str) -> Model:
    with Fields(value, where) as fields:
        return Model(
            architecture=fields.take("architecture", text),
            dtype=fields.take("dtype", _dtype),
            vocabulary=fields.take_optional("vocabulary", natural),
            max_context=fields.take_optional("max_context", natural),
            bos_token_ids=fields.take_optional("bos_token_ids", array(natural)) or (),
            eos_token_ids=fields.take_optional("eos_token_ids", array(natural)) or (),
        )


def _program(value: Any, where: str) -> Program:
    with Fields(value, where) as fields:
        program = Program(
            target=fields.take("target", text),
            file=fields.take("file", _file),
            sha256=fields.take("sha256", _sha256),
            drivers=fields.take("drivers", array(text)),
            architecture=fields.take_optional("architecture", _architecture),
            cpu=fields.take_optional("cpu", text),
            features=fields.take_optional("features", array(text)) or (),
            device=fields.take_optional("device", text),
        )
    if not program.drivers:
        raise CheckpointError("empty", where=f"{where}.drivers", accepted="at least one driver")
    return program


def _parameter_tensor(value: Any, where: str) -> ParameterTensor:
    with Fields(value, where) as fields:
        return ParameterTensor(bytes=fields.take("bytes", natural))


def _archive(value: Any, where: str) -> ParameterArchive:
    with Fields(value, where) as fields:
        return ParameterArchive(
            scope=fields.take("scope", text),
            file=fields.take("file", _file),
            sha256=fields.take("sha256", _sha256),
            layout=fields.take("layout", text),
            bytes=fields.take("bytes", natural),
            targets=fields.take("targets", array(text)),
            tensors=fields.take("tensors", mapping(_parameter_tensor)),
        )


def _tensor(value: Any, where: str) -> Tensor:
    with Fields(value, where) as fields:
        return Tensor(
            name=fields.take("name", text),
            shape=fields.take("shape", array(_dimension)),
            dtype=fields.take("dtype", _dtype),
        )


def _entry_point(value: Any, where: str) -> EntryPoint:
    with Fields(value, where) as fields:
        return EntryPoint(
            inputs=fields.take("inputs", array(_tensor)), outputs=fields.take("outputs", array(_tensor))
        )


def _layer(value: Any, where: str) -> Layer:
    with Fields(value, where) as fields:
        return Layer(
            name=fields.take("name", text),
            shape=fields.take("shape", array(natural)),
            scheme=fields.take("scheme", text),
            activations=fields.take("activations", text),
            kernel=fields.take("kernel", text),
        )
