"""The manifest of a bundle: the contract between the compiler, this runtime and programs in other languages.

`manifest.schema.json` beside this file says the same as a JSON schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError

FORMAT = "halfbyte-bundle"
VERSION = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class Model:
    """What the program computes.

    Attributes:
        architecture: the model's family (``llama``), or ``graph`` for a program compiled from a plain graph.
        dtype: element type of the model's activations, e.g. ``f32``.
        vocabulary: number of tokens, None for graphs.
        max_context: positions the caches hold, None for graphs.
        bos_token_ids: tokens a text begins with.
        eos_token_ids: tokens that end a text.
    """

    architecture: str
    dtype: str
    vocabulary: int | None = None
    max_context: int | None = None
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """One compiled program.

    Attributes:
        target: ``cpu``, ``vulkan`` or ``cuda``.
        file: the .vmfb, relative to the bundle.
        sha256: of the file, 64 hexadecimal digits.
        drivers: IREE drivers that can run it, the preferred one first.
        architecture: ``x86_64`` or ``aarch64``; None where the target is no CPU.
        cpu: name of the CPU it was compiled for, as LLVM spells it.
        features: of the device, those it uses: of a CPU as LLVM spells them, of a Vulkan device as IREE's driver does;
            of a CUDA device the lowest version of its driver, as ``cuda-11.6``.
        device: the kind of GPU it was compiled for: a name of the target's, or IREE's description.
    """

    target: str
    file: str
    sha256: str
    drivers: tuple[str, ...]
    architecture: str | None = None
    cpu: str | None = None
    features: tuple[str, ...] = ()
    device: str | None = None


@dataclass(frozen=True)
class ParameterTensor:
    """One tensor of an archive.

    Attributes:
        bytes: its size.
    """

    bytes: int


@dataclass(frozen=True)
class ParameterArchive:
    """One archive of parameters (.irpa).

    Attributes:
        scope: the parameter scope its programs look it up by.
        file: the archive, relative to the bundle.
        sha256: of the file, 64 hexadecimal digits.
        layout: how packed weights are laid out, e.g. ``n64k8``.
        bytes: size of the file.
        targets: targets whose programs use it.
        tensors: key to tensor, for every tensor in the archive.
    """

    scope: str
    file: str
    sha256: str
    layout: str
    bytes: int
    targets: tuple[str, ...]
    tensors: Mapping[str, ParameterTensor]


@dataclass(frozen=True)
class Tensor:
    """An argument, a result or a cache.

    Attributes:
        name: what it is called in messages and by callers.
        shape: a number per dimension, or a name where it varies; one name means one size within a call.
        dtype: element type as in MLIR, e.g. ``f32``, ``i64``, ``bf16``.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {'x'.join([*map(str, self.shape), self.dtype])}"


# By which `prefill` and `decode` of a program that draws tokens take temperature, top_k, top_p and a random number.
SAMPLING = Tensor("sampling", (4,), "f32")


@dataclass(frozen=True)
class EntryPoint:
    """A function of the program; `inputs` and `outputs` are in order of the call."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """What became of one linear layer: see the report for more.

    Attributes:
        name: module path in the model.
        shape: logical (N, K).
        scheme: quantization of the weight, or ``float``.
        activations: ``int8`` (or another of its roundings, such as ``int8_affine``), ``fp8``, ``none`` or ``float``.
        kernel: what computes it.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str
    activations: str
    kernel: str


@dataclass(frozen=True)
class Manifest:
    """Everything manifest.json holds.

    Attributes:
        model: what the program computes.
        programs: one per target.
        parameters: the archives.
        entry_points: name to signature.
        caches: arguments that calls update in place, in order of the call; none for stateless programs.
        layers: the linear layers.
        tokenizer: names of the tokenizer's files, relative to the bundle.
        versions: distribution name to version, of what compiled the bundle.
    """

    model: Model
    programs: tuple[Program, ...]
    parameters: tuple[ParameterArchive, ...]
    entry_points: Mapping[str, EntryPoint]
    caches: tuple[Tensor, ...] = ()
    layers: tuple[Layer, ...] = ()
    tokenizer: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Manifest:
        """Reads and checks ``folder/manifest.json``.

        Raises:
            CheckpointError: there is none, it is no JSON, or it says something that makes no sense.
        """
        path = Path(folder) / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                "not a halfbyte bundle",
                where=str(folder),
                found=f"no {FILE_NAME}" if path.parent.is_dir() else "no such folder",
                accepted="a folder written by `halfbyte compile`",
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError("unreadable manifest", where=str(path), found=str(error)) from None
        return Manifest.from_json(content, where=str(path))

    @staticmethod
    def from_json(content: Any, *, where: str = FILE_NAME) -> Manifest:
        """Makes a manifest of parsed JSON, checking everything.

        Args:
            content: what `json.load` returned.
            where: name of the source, for messages.

        Raises:
            CheckpointError: naming the field, what was found and what would be accepted.
        """
        from halfbyte.runtime.manifest_reader import read_manifest  # it imports this module

        return read_manifest(content, where)

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists for `json.dump`; `from_json` makes an equal manifest of them."""
        return {"format": FORMAT, "version": VERSION, **_plain(self)}


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as dicts and lists; attributes that are None are left out."""
    if hasattr(value, "__dataclass_fields__"):
        pairs = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return {name: _plain(item) for name, item in pairs.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
