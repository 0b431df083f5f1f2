"""From exported graphs to MLIR text in the torch dialect, with weights and caches as plain arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from halfbyte.errors import CompilerError, UnsupportedLayerError
from halfbyte.lowering.decomposition import decomposed
from halfbyte.lowering.quantize_operators import quantize_operators
from halfbyte.passes.ops.topk import MOST_TAKEN, MOST_VALUES, TOPK_DTYPES

_aten = torch.ops.aten
WHOLE = (_aten.scaled_dot_product_attention.default,)
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class TensorType:
    """Shape, with the names of sizes that vary, and dtype."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> TensorType | None:
        """That of a fake tensor; None for anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        return cls(tuple(size if isinstance(size, int) else str(size) for size in value.shape), value.dtype)


@dataclass(frozen=True)
class Imported:
    """MLIR text and what its arguments are.

    Attributes:
        text: a module with one ``func.func`` per entry point; state arguments come first.
        state: by entry point, the state name of each argument, or None for an input of the user.
        values: by entry point, the type of each argument, or None where it is no tensor.
        results: by entry point, that of each result.
        names: by entry point, the name of each argument.
    """

    text: str
    state: Mapping[str, list[str | None]]
    values: Mapping[str, list[TensorType | None]]
    results: Mapping[str, list[TensorType | None]]
    names: Mapping[str, list[str]]


def topk(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """aten.topk along the last dimension as ``halfbyte::topk``, or as k argmaxes where that does not take it.

    IREE 3.13 sorts in place on one shared iota, so the second topk of a program is wrong. Argmaxes take the first of
    equal values.
    """
    if not largest or dim not in (-1, x.dim() - 1):
        raise CompilerError(
            "only the largest values along the last dimension can be taken", where="aten.topk"
        )
    width = x.shape[-1]
    if x.dtype in TOPK_DTYPES and isinstance(width, int) and width <= MOST_VALUES and 1 <= k <= MOST_TAKEN:
        found = torch.ops.halfbyte.topk(x.reshape(-1, width), k, sorted)
        values, indices = (part.reshape(*x.shape[:-1], k) for part in found)
        return values, indices
    places = torch.arange(width)
    best, where = [], []
    for _ in range(k):
        value, index = torch.max(x, -1)
        best.append(value)
        where.append(index)
        x = torch.where(places == index[..., None], float("-inf"), x)
    return torch.stack(best, -1), torch.stack(where, -1)


def right_shift(x: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """x >> by, arithmetic for signed and logical for unsigned integers, as the operator torch-mlir knows."""
    amount = by if isinstance(by, torch.Tensor) else torch.full((), by, dtype=x.dtype)
    return torch.bitwise_right_shift(x, amount)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """As torch defines it; torch-mlir's constants of the tanh form are cut off after four digits."""
    if approximate == "none":
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@functools.cache
def decompositions() -> dict[Any, Any]:
    """The core table, minus attention (which torch-mlir takes whole), plus what torch-mlir has no lowering for."""
    table = torch.export.default_decompositions()
    for operator in WHOLE:
        table.pop(operator, None)
    extra = torch._decomp.get_decompositions(
        [_aten.squeeze.dims, _aten.index_copy, _aten.linspace.Tensor_Tensor]
    )
    table.update(extra)
    table[_aten.topk.default] = topk
    table[_aten.gelu.default] = gelu
    table[_aten.__rshift__.Tensor] = table[_aten.__rshift__.Scalar] = right_shift
    return dict(table.items())


def import_entries(entries: Mapping[str, ExportedProgram]) -> Imported:
    """Decomposes and imports every entry point into one module.

    Raises:
        UnsupportedLayerError: a graph mutates its own buffers, or an operation cannot be imported.
    """
    from torch_mlir import ir
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.extras.fx_importer import FxImporter

    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    state: dict[str, list[str | None]] = {}
    values: dict[str, list[TensorType | None]] = {}
    results: dict[str, list[TensorType | None]] = {}
    names: dict[str, list[str]] = {}
    table = {**decompositions(), **quantize_operators()}
    for name, entry in entries.items():
        lowered = decomposed(entry, table, WHOLE)
        _drop_none_results(lowered)
        state[name], values[name], names[name] = _as_arguments(name, lowered)
        outputs = {node.name: node.meta.get("val") for node in lowered.graph.nodes}
        results[name] = [
            TensorType.of(outputs.get(spec.arg.name)) for spec in lowered.graph_signature.output_specs
        ]
        try:
            importer.import_program(lowered, func_name=name)
        except Exception as error:
            raise UnsupportedLayerError(
                "torch-mlir cannot import this graph", where=f"entry point {name}", found=str(error)[:2000]
            ) from error
    return Imported(str(importer.module), state, values, results, names)


def _drop_none_results(entry: ExportedProgram) -> None:
    """Leaves out results that are None, as models' output classes have them."""
    output, signature = entry.graph.output_node(), entry.graph_signature
    results: Any = output.args[0]
    kept = [index for index, result in enumerate(results) if result is not None]
    output.args = (tuple(results[index] for index in kept),)
    signature.output_specs[:] = [signature.output_specs[index] for index in kept]


def _as_arguments(
    name: str, entry: ExportedProgram
) -> tuple[list[str | None], list[TensorType | None], list[str]]:
    """Turns parameters, buffers and lifted constants into inputs of the user; says which argument is which."""
    signature = entry.graph_signature
    for spec in signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            raise UnsupportedLayerError(
                "the graph writes to a buffer of its own",
                where=f"entry point {name}",
                found=f"buffer {spec.target}",
                accepted="state as arguments: take the buffer as an input and use torch.ops.halfbyte.cache_append",
                advice="pass the state in and export again",
            )
    fakes = {node.name: node.meta.get("val") for node in entry.graph.nodes if node.op == "placeholder"}
    state: list[str | None] = []
    values: list[TensorType | None] = []
    names: list[str] = []
    for index, spec in enumerate(signature.input_specs):
        kept = spec.kind in _STATE
        state.append(spec.target if kept else None)
        values.append(TensorType.of(fakes.get(spec.arg.name)))
        names.append(spec.arg.name)
        if kept:
            signature.input_specs[index] = InputSpec(InputKind.USER_INPUT, spec.arg, None, None)
    return state, values, names
