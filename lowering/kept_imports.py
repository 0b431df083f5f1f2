"""Keeps what models were exported and imported to, so that the same model with the same settings skips both.

What decides the graphs is the key: the model's modules, configuration, parameters and buffers, the settings, this
package's own code and the versions of what traces. Weights do not: they are read anew, by their names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from halfbyte.lowering.cache import cache_folder, keep
from halfbyte.lowering.importer import Imported, TensorType
from halfbyte.passes.program import Merge, Program

_TRACERS = ("torch", "torch-mlir", "transformers")


@dataclass(frozen=True)
class KeptImport:
    """The place of one model's import in the cache."""

    path: Path

    @classmethod
    def of(cls, model: torch.nn.Module, settings: Mapping[str, object]) -> KeptImport:
        """Where the import of a model with empty weights is kept.

        Args:
            model: as it is exported; buffers that have values count with them.
            settings: whatever else decides the graphs, by name; values with a stable ``str``.
        """
        digest = hashlib.sha256()
        for part in (*_traced_with(), *_described(model), *(f"{k}={settings[k]}" for k in sorted(settings))):
            digest.update(part if isinstance(part, bytes) else part.encode())
            digest.update(b"\0")
        return cls(cache_folder() / f"{digest.hexdigest()}.import.json")

    def read(self) -> tuple[Imported, dict[str, Merge], dict[str, str], dict[str, str]] | None:
        """The import, the linears merged on the way, what others were fused with and the norms; None without."""
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            merges = {
                name: Merge(tuple(merge["members"]), int(merge["outputs"]))
                for name, merge in kept["merges"].items()
            }
            arguments, results = (
                {entry: [_type(kind) for kind in kinds] for entry, kinds in kept[key].items()}
                for key in ("values", "results")
            )
            return (
                Imported(kept["text"], kept["state"], arguments, results, kept["names"]),
                merges,
                kept["fused"],
                kept["norms"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, imported: Imported, program: Program) -> None:
        """Keeps an import, unless it has state that only its graphs hold."""
        sourced = {*program.tensors, *program.layers, *program.experts}
        names = {name for state in imported.state.values() for name in state if name is not None}
        if not all(name in sourced or name.rpartition(".")[0] in sourced for name in names):
            return
        merges = {name: asdict(one) for name, one in program.merges.items()}
        kept = {**asdict(imported), "merges": merges, "fused": program.report.fused}
        kept["norms"] = program.report.norms
        keep(self.path, json.dumps(kept, default=_dtype_name).encode())


def _traced_with() -> Iterator[str | bytes]:
    for package in _TRACERS:
        yield f"{package} {version(package)}"
    for folder, _, files in sorted(os.walk(Path(__file__).parents[1], followlinks=True)):
        for file in sorted(files):
            if file.endswith(".py"):
                yield file
                yield (Path(folder) / file).read_bytes()


def _described(model: torch.nn.Module) -> Iterator[str | bytes]:
    config: Any = model.config
    yield config.to_json_string(use_diff=False)
    yield repr(model)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name} {first.setdefault(id(parameter), name)} {tuple(parameter.shape)} {parameter.dtype}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name} {tuple(buffer.shape)} {buffer.dtype}"
        if not buffer.is_meta:
            yield buffer.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _type(kept: Any) -> TensorType | None:
    if kept is None:
        return None
    dtype = getattr(torch, kept["dtype"])
    if not isinstance(dtype, torch.dtype) or not all(isinstance(size, int | str) for size in kept["shape"]):
        raise ValueError("not a type of tensors")
    return TensorType(tuple(kept["shape"]), dtype)


def _dtype_name(value: object) -> str:
    assert isinstance(value, torch.dtype)
    return str(value).removeprefix("torch.")
