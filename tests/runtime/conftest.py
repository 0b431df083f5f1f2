"""Tiny bundles, written by hand and compiled here, and what they compute, in numpy."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import iree.compiler
import iree.runtime
import numpy as np
import pytest

from halfbyte.runtime import cpu_features
from halfbyte.runtime.manifest import (
    EntryPoint,
    Manifest,
    Model,
    ParameterArchive,
    ParameterTensor,
    Program,
    Tensor,
)

DATA = Path(__file__).parent / "data"
VOCABULARY, WIDTH, CONTEXT = 11, 4, 16


class TinyDecoder:
    """The reference of tiny_decoder.mlir. All numbers are small integers, so results are exact."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.embedding = random.integers(-4, 5, (VOCABULARY, WIDTH)).astype(np.float32)
        self.head = random.integers(-4, 5, (WIDTH, VOCABULARY)).astype(np.float32)

    def forward(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Logits [T, vocabulary] of every position."""
        rows = self.embedding[tokens]
        return np.cumsum(rows + 3 * rows * rows, axis=0) @ self.head

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next tokens, each the most likely."""
        text = list(tokens)
        for _ in range(count):
            text.append(int(np.argmax(self.forward(text)[-1])))
        return text[len(tokens) :]


def write_bundle(
    folder: Path, mlir: Path, manifest: Manifest, tensors: dict[str, np.ndarray[Any, Any]]
) -> None:
    """Compiles for this CPU and writes the files that `manifest` speaks of, then the manifest itself."""
    folder.mkdir(parents=True)
    program = iree.compiler.compile_file(
        str(mlir),
        extra_args=[
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu=host",
        ],
    )
    (folder / "model.cpu.vmfb").write_bytes(program)
    programs = (
        Program(
            "cpu",
            "model.cpu.vmfb",
            hashlib.sha256(program).hexdigest(),
            ("local-task", "local-sync"),
            cpu_features.architecture(),
            "host",
            tuple(sorted(cpu_features.host_features())),
        ),
    )
    parameters: tuple[ParameterArchive, ...] = ()
    if tensors:
        parameters = (write_archive(folder / "model.n64k8.irpa", tensors),)
    written = replace(manifest, programs=programs, parameters=parameters)
    (folder / "manifest.json").write_text(json.dumps(written.to_json()))


def write_archive(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> ParameterArchive:
    """Writes a parameter archive and returns what a manifest says of it."""
    index = iree.runtime.ParameterIndex()
    for key, tensor in tensors.items():
        index.add_buffer(key, tensor)
    index.create_archive_file(str(path))
    content = path.read_bytes()
    sizes = {key: ParameterTensor(tensor.nbytes) for key, tensor in tensors.items()}
    digest = hashlib.sha256(content).hexdigest()
    return ParameterArchive("model", path.name, digest, "n64k8", len(content), ("cpu",), sizes)


@pytest.fixture(scope="session")
def reference() -> TinyDecoder:
    return TinyDecoder()


@pytest.fixture(scope="session")
def decoder_bundle(tmp_path_factory: pytest.TempPathFactory, reference: TinyDecoder) -> Path:
    """A language model with a tokenizer; read only."""
    folder = tmp_path_factory.mktemp("bundles") / "tiny"
    caches = tuple(Tensor(name, (CONTEXT, WIDTH), "f32") for name in ("k0", "v0"))
    position = Tensor("position", (1,), "i64")
    logits = (Tensor("logits", (VOCABULARY,), "f32"),)
    many, one = Tensor("tokens", ("T",), "i64"), Tensor("token", (1,), "i64")
    manifest = Manifest(
        model=Model("llama", "f32", VOCABULARY, CONTEXT, (1,), (2,)),
        programs=(),
        parameters=(),
        entry_points={
            "forward": EntryPoint((many,), (Tensor("logits", ("T", VOCABULARY), "f32"),)),
            "prefill": EntryPoint((many, position, *caches), logits),
            "decode": EntryPoint((one, position, *caches), logits),
        },
        caches=caches,
        tokenizer=("tokenizer.json",),
        versions={"iree-base-compiler": "3.13.0"},
    )
    tensors = {"embedding": reference.embedding, "head": reference.head}
    write_bundle(folder, DATA / "tiny_decoder.mlir", manifest, tensors)
    shutil.copy(DATA / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def graph_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Entry points without caches and parameters; read only."""
    folder = tmp_path_factory.mktemp("bundles") / "graph"
    x, y, total, product = (Tensor(name, ("T", 3), "f32") for name in ("x", "y", "sum", "product"))
    kinds = (
        Tensor("b", (2, 3), "bf16"),
        Tensor("e", (4,), "f8E4M3FN"),
        Tensor("h", (2,), "f16"),
        Tensor("p", (3,), "i1"),
        Tensor("i", (), "i32"),
    )
    pair = (Tensor("x", (2,), "i32"),)
    manifest = Manifest(
        model=Model("graph", "f32"),
        programs=(),
        parameters=(),
        entry_points={
            "affine": EntryPoint((x, y), (total, product)),
            "types": EntryPoint(kinds, kinds),
            "scalar": EntryPoint((Tensor("n", (), "i64"), Tensor("x", (), "f32")), (Tensor("m", (), "i64"),)),
            "refuse": EntryPoint(pair, pair),
        },
    )
    write_bundle(folder, DATA / "tiny_graph.mlir", manifest, {})
    return folder


@pytest.fixture
def copied_bundle(tmp_path: Path, decoder_bundle: Path) -> Path:
    """The language model, to be damaged."""
    return Path(shutil.copytree(decoder_bundle, tmp_path / "tiny"))
