"""Merges quantized linears that read the same input (q/k/v, gate/up) into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from halfbyte.passes.program import (
    LayerSource,
    Merge,
    Program,
    add_state,
    drop_dead_state,
    layer_nodes,
    replace,
    state_names,
    state_value,
)
from halfbyte.passes.weight import Fp8Tensor, QuantTensor, Weight, scales_by_row
from halfbyte.passes.words import CodeWords

_LINEAR = torch.ops.halfbyte.linear.default
_FP8 = torch.ops.halfbyte.fp8_block_linear.default
# The tensors of an operator, in the order of its arguments after x.
_TENSORS: dict[Any, tuple[str, ...]] = {
    _LINEAR: ("codes", "scale", "zero", "minimum", "bias"),
    _FP8: ("codes", "scale", "bias"),
}


@dataclass(frozen=True)
class MergeLinears:
    """One GEMM instead of several where only the columns differ; each column is computed as before.

    Linears merge when their input, group size, scale dtype, kind of zero point, levels, activations (and what they are
    rounded with, where it is fixed) and presence of a bias agree; e4m3 ones when their input, inputs per block, scale
    dtype, activations and presence of a bias do. Inputs permuted by activation order agree when the permutations are
    equal.
    """

    name: str = "merge-linears"

    def run(self, program: Program) -> int:
        merged: dict[str, tuple[str, ...]] = {}
        for entry in program.entries.values():
            for nodes in _groups(program, entry).values():
                if len(nodes) > 1:
                    name, members = _merge(program, entry, nodes)
                    merged[name] = members
            drop_dead_state(entry)
        _tell(program, merged)
        return len(merged)


@dataclass(frozen=True)
class MergeAsBefore:
    """The layers that `MergeLinears` made of a program's, for graphs that have them merged already."""

    merges: Mapping[str, Merge]
    name: str = MergeLinears.name

    def run(self, program: Program) -> int:
        for name, merge in self.merges.items():
            _join(program, name, merge)
        _tell(program, {name: program.layers[name].members for name in self.merges})
        return len(self.merges)


def _tell(program: Program, merged: Mapping[str, tuple[str, ...]]) -> None:
    program.report.merged.update({name: list(members) for name, members in merged.items()})
    rows = {row.name: row for row in program.report.layers}
    for name, members in merged.items():
        for member in members:
            if member in rows:
                known = f"{rows[member].reason}; " if rows[member].reason else ""
                rows[member].reason = f"{known}computed by {name}"


def _groups(program: Program, entry: ExportedProgram) -> dict[object, list[torch.fx.Node]]:
    names = state_names(entry)
    groups: dict[object, list[torch.fx.Node]] = {}
    for node in layer_nodes(entry.graph):
        arguments: Any = node.args
        x, codes, scale = arguments[:3]
        if names.get(codes.name, "").removesuffix(".codes") not in program.layers:
            continue  # the graph's own call of the operator
        given = tuple(part is None for part in arguments[3 : 1 + len(_TENSORS[node.target])])
        inputs = codes.meta["val"].shape[1]
        key = (_input_key(entry, names, x), node.target, inputs, scale.meta["val"].dtype, given)
        groups.setdefault((*key, *_settings_key(entry, names, node)), []).append(node)
    return groups


def _settings_key(entry: ExportedProgram, names: dict[str, str], node: torch.fx.Node) -> tuple[object, ...]:
    """The settings, of those that are state (a fixed scale and what goes with it) the values."""
    return tuple(
        state_value(entry, names[part.name]).numpy().tobytes() if isinstance(part, torch.fx.Node) else part
        for part in _settings(node)
    )


def _settings(node: torch.fx.Node) -> tuple[object, ...]:
    """The arguments after the tensors, as the merged layer has them: e4m3 weights get a scale for every output."""
    settings = node.args[1 + len(_TENSORS[node.target]) :]
    return settings if node.target is _LINEAR else (1, *settings[1:])


def _state(entry: ExportedProgram, names: dict[Any, str], node: Any, position: int) -> torch.Tensor:
    """The tensor behind an argument, with one row for every output."""
    value = state_value(entry, names[node.args[position].name])
    if node.target is _FP8 and _TENSORS[_FP8][position - 1] == "scale":
        return scales_by_row(value, node.args[1].meta["val"].shape[0], node.args[4])
    return value


def _input_key(entry: ExportedProgram, names: dict[str, str], x: Any) -> object:
    """What the layer reads: the node itself, or what an activation order permutes and the order's values."""
    if x.op == "call_function" and x.target is torch.ops.aten.index_select.default:
        base, _, order = x.args
        if order.name in names:
            return (base, state_value(entry, names[order.name]).numpy().tobytes())
    return x


def _merge(
    program: Program, entry: ExportedProgram, nodes: list[torch.fx.Node]
) -> tuple[str, tuple[str, ...]]:
    names: dict[Any, str] = {**state_names(entry)}
    members = tuple(names[node.args[1].name].removesuffix(".codes") for node in nodes)
    name = merged_name(members)
    first = nodes[0]
    arguments: list[object] = [first.args[0]]
    for position, tensor in enumerate(_TENSORS[first.target], start=1):
        if first.args[position] is None:
            arguments.append(None)
            continue
        parts = [_state(entry, names, node, position) for node in nodes]
        rows = sum(part.shape[0] for part in parts)
        joined = parts[0].new_empty((rows, *parts[0].shape[1:])) if program.empty else torch.cat(parts)
        arguments.append(add_state(entry, f"{name}.{tensor}", joined))
    with entry.graph.inserting_before(first):
        whole = entry.graph.call_function(first.target, (*arguments, *_settings(first)))
        value = first.meta["val"]
        total = sum(node.meta["val"].shape[-1] for node in nodes)
        whole.meta = dict(first.meta, val=value.new_empty((*value.shape[:-1], total)))
        start, pieces = 0, []
        for node in nodes:
            end = start + node.meta["val"].shape[-1]
            piece = entry.graph.call_function(torch.ops.aten.slice.Tensor, (whole, -1, start, end))
            piece.meta = dict(node.meta)
            pieces.append(piece)
            start = end
    for node, piece in zip(nodes, pieces, strict=True):
        replace(entry, node, piece)
    if name not in program.layers:
        _join(program, name, Merge(members, total))
    return name, program.layers[name].members


def _join(program: Program, name: str, merge: Merge) -> None:
    sources = [program.layers[member] for member in merge.members]
    has_bias = sources[0].bias is not None
    program.merges[name] = merge
    program.layers[name] = LayerSource(
        lambda: join_weights(name, (source.weight() for source in sources), merge.outputs),
        _join_biases([source.bias for source in sources if source.bias]) if has_bias else None,
        tuple(member for source in sources for member in source.members),
    )


def merged_name(members: tuple[str, ...]) -> str:
    """``a.b.q_proj``, ``a.b.k_proj`` -> ``a.b.q_proj+k_proj``."""
    paths = [member.split(".") for member in members]
    shared = 0
    while len({tuple(path[: shared + 1]) for path in paths}) == 1 and all(
        len(path) > shared + 1 for path in paths
    ):
        shared += 1
    prefix = "".join(part + "." for part in paths[0][:shared])
    return prefix + "+".join(member[len(prefix) :] for member in members)


def join_weights(name: str, parts: Iterable[Weight], outputs: int) -> Weight:
    """One weight whose rows are those of the parts, in order; their schemes and permutations must agree.

    Of e4m3 weights the numbers of outputs per block need not. The parts are taken one at a time, so that memory
    holds no more than one of them beside the whole.

    Args:
        outputs: rows of all parts.
    """
    rows: dict[str, torch.Tensor] = {}
    filled = 0
    for part in parts:
        if part.shape[0] == outputs:  # alone: nothing to copy
            return _maker(name, part)(_tensors_by_row(part))
        tensors = _tensors_by_row(part)
        if isinstance(part, QuantTensor) and rows and rows["codes"].dtype != tensors["codes"].dtype:
            if rows["codes"].dtype == torch.int32:
                rows["codes"] = CodeWords(rows["codes"], part.shape[1], part.bits).codes()
            tensors["codes"] = part.codes
        for tensor, values in tensors.items():
            if tensor not in rows:
                rows[tensor] = _empty_like(values, outputs)
            rows[tensor][filled : filled + len(values)] = values
        filled += part.shape[0]
        whole = _maker(name, part)
        del part  # before the next is read
    return whole(rows)


def _empty_like(values: torch.Tensor, rows: int) -> torch.Tensor:
    """More rows of the same, in the same order of memory."""
    if values.dim() == 2 and values.stride(0) == 1:
        return values.new_empty((values.shape[1], rows)).t()
    return values.new_empty((rows, *values.shape[1:]))


def _tensors_by_row(weight: Weight) -> dict[str, torch.Tensor]:
    if isinstance(weight, Fp8Tensor):
        scale = scales_by_row(weight.scale, weight.shape[0], weight.block_outputs)
        return {"bits": weight.bits, "scale": scale}
    stored = weight.stored
    codes = stored.words if isinstance(stored, CodeWords) else stored
    tensors = {"codes": codes, **{name: getattr(weight, name) for name in ("scale", "zero", "minimum")}}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _maker(name: str, weight: Weight) -> Callable[[dict[str, torch.Tensor]], Weight]:
    """Makes a weight with the settings of this one, from other tensors."""
    if isinstance(weight, Fp8Tensor):
        size = weight.block_inputs
        return lambda rows: Fp8Tensor(name, rows["bits"], rows["scale"], 1, size)
    settings = (weight.permutation, weight.bits, weight.levels)
    size, inputs, bits = weight.group_size, weight.shape[1], weight.bits

    def make(rows: dict[str, torch.Tensor]) -> QuantTensor:
        codes = rows["codes"]
        stored = CodeWords(codes, inputs, bits) if codes.dtype == torch.int32 else codes
        return QuantTensor(
            name, stored, rows["scale"], size, rows.get("zero"), rows.get("minimum"), *settings
        )

    return make


def _join_biases(biases: list[Callable[[], torch.Tensor]]) -> Callable[[], torch.Tensor]:
    return lambda: torch.cat([bias() for bias in biases])
