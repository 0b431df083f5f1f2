"""Finds linears whose weight a graph dequantizes, and makes them ``halfbyte::linear`` or ``fp8_block_linear``.

The steps are files of their own: the products (`linear_products`), what their weights were made of
(`dequantized_weights`), the weight object that comes of it (`regroup`), and what is done to their inputs
(`quantized_inputs`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from halfbyte.passes.dequantized_weights import dequantization
from halfbyte.passes.graph_patterns import RESHAPES, module_path, new_call
from halfbyte.passes.linear_products import Product, find_products
from halfbyte.passes.program import (
    LayerSource,
    Program,
    add_state,
    added_state,
    drop_dead_state,
    replace,
    state_names,
)
from halfbyte.passes.quantized_inputs import InputRounding
from halfbyte.passes.regroup import regrouped
from halfbyte.passes.report import LayerRow, Refusal
from halfbyte.passes.scheme import Activations, mode_name
from halfbyte.passes.state_eval import StateEval
from halfbyte.passes.weight import Fp8Tensor, QuantTensor, Weight, same

_aten = torch.ops.aten


@dataclass(frozen=True)
class FindDequantizedLinears:
    """Rewrites every linear of the form x @ ((codes - zero) * scale), or codes * scale + minimum.

    Codes must be integers 0..15 (or -8..7), or 8 bits wide (0..255 or -128..127), or e4m3 values; scales and zero
    points must be constant in groups of a multiple of 8 inputs, in any order of the inputs (an activation order
    becomes one permutation of x), those of e4m3 in blocks. What does not fit stays as it is, and a refusal says why.

    Attributes:
        activations: what the new linears do to their input, whatever the graph does to it. None: what the graph
            does, if it is rounded to int8 per token or with a fixed scale, and nothing otherwise; any other rounding
            of the graph's stays in it, before the linear.
        digits: digit planes of the float path; 0 chooses 3 for float32 graphs and 2 for 16-bit ones.
        min_tokens: see ``halfbyte::linear``.
    """

    activations: Activations | None = None
    digits: int = 0
    min_tokens: int = 0
    name: str = "find-dequantized-linears"

    def run(self, program: Program) -> int:
        if (
            program.empty
        ):  # made by a checkpoint reader: the linears are in place, and there is nothing to evaluate
            return 0
        found, other = 0, Counter[str]()
        for entry in program.entries.values():
            drop_dead_state(entry)  # checks of tensors would count as their users
            evaluate = StateEval(entry)
            for product in find_products(entry, evaluate):
                found += self._rewrite(program, entry, evaluate, product, other)
            drop_dead_state(entry)
        for how, count in other.items():
            program.report.warnings.append(
                f"{count} linear{'s'[: count > 1]}: the graph rounds the input to {how}; here it is int8 per token, "
                "scale absmax / 127"
            )
        return found

    def _rewrite(
        self,
        program: Program,
        entry: ExportedProgram,
        evaluate: StateEval,
        product: Product,
        other: Counter[str],
    ) -> int:
        name = _layer_name(entry, product)
        match = dequantization(evaluate, product)
        if match is None:
            _left_in_float(program, entry, name, product)
            return 0
        weight = regrouped(name, match)
        activations = self._activations(product.rounding, weight)
        if not isinstance(weight, Refusal) and activations.family not in weight.scheme.computed:
            weight = Refusal(
                name,
                f"{weight.scheme} under {activations.value} activations",
                " or ".join(kind.value for kind in weight.scheme.computed),
                "ask for such activations, or quantize the layer otherwise",
            )
        if isinstance(weight, Refusal):
            program.report.refusals.append(weight)
            _left_in_float(program, entry, name, product, reason=f"found {weight.found}")
            return 0
        rounding = product.rounding
        kept = rounding is not None and self.activations is None and activations is Activations.NONE
        if rounding is not None and self.activations is None and not kept and not rounding.same:
            other[rounding.how] += 1
        x = _rounded(entry, product) if kept or rounding is None else _unrounded(entry, product, rounding)
        reason = f"the graph's own rounding of its input, {rounding.how}, stays before it" if kept else ""
        fixed = None
        if rounding is not None and activations is Activations.INT8_FIXED:
            fixed, x = rounding.fixed, _as_wide(entry, product, x)
        _insert(program, entry, product, x, weight, activations, fixed, self, reason)
        return 1

    def _activations(self, rounding: InputRounding | None, weight: Weight | Refusal) -> Activations:
        if self.activations is not None:
            return self.activations
        asked = None if rounding is None else rounding.activations
        if asked is None:
            return Activations.NONE
        computed = isinstance(weight, Refusal) or asked.family in weight.scheme.computed
        return asked if computed else Activations.NONE


def _rounded(entry: ExportedProgram, product: Product) -> Node:
    """The input as the graph rounds it, or just the input: float in any case."""
    if product.input_scale is None:
        return product.x
    with entry.graph.inserting_before(product.node):
        whole = new_call(entry.graph, _aten.to.dtype, product.x, product.input_scale.meta["val"].dtype)
        return new_call(entry.graph, _aten.mul.Tensor, whole, product.input_scale)


def _unrounded(entry: ExportedProgram, product: Product, rounding: InputRounding) -> Node:
    """What the graph rounds, in the shape that it has in the product."""
    x = rounding.x
    with entry.graph.inserting_before(product.node):
        for node in reversed(rounding.passed):
            if node.target in RESHAPES:
                x = new_call(entry.graph, node.target, x, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
    return x


def _as_wide(entry: ExportedProgram, product: Product, x: Node) -> Node:
    """In float32 where the product is: rounding with a fixed scale is in float32 whatever dtype x has."""
    if product.node.meta["val"].dtype != torch.float32 or x.meta["val"].dtype == torch.float32:
        return x
    with entry.graph.inserting_before(product.node):
        return new_call(entry.graph, _aten.to.dtype, x, torch.float32)


def _insert(
    program: Program,
    entry: ExportedProgram,
    product: Product,
    x: Node,
    weight: Weight,
    activations: Activations,
    fixed: torch.Tensor | None,
    options: FindDequantizedLinears,
    reason: str,
) -> None:
    bias = None if product.bias is None else StateEval(entry)(product.bias).float()
    name = _free_name(program, weight, bias)
    placed = added_state(entry)

    def state(tensor: str, value: torch.Tensor | None) -> torch.fx.Node | None:
        known = placed.get(f"{name}.{tensor}")  # of the same layer called twice
        return known if known is not None or value is None else add_state(entry, f"{name}.{tensor}", value)

    parts = weight.tensors()
    arguments = [state(tensor, value) for tensor, value in parts.items()] + [state("bias", bias)]
    order = state("permutation", weight.permutation) if isinstance(weight, QuantTensor) else None
    dtype = x.meta["val"].dtype
    rounded_with = None if fixed is None else _fixed_state(entry, name, fixed)
    with entry.graph.inserting_before(product.node):
        if order is not None:
            x = new_call(entry.graph, _aten.index_select.default, x, -1, order)
        if isinstance(weight, Fp8Tensor):
            target = torch.ops.halfbyte.fp8_block_linear.default
            settings: tuple[int | str | Node | None, ...] = (
                weight.block_outputs,
                weight.block_inputs,
                activations.value,
            )
        else:
            target = torch.ops.halfbyte.linear.default
            digits = options.digits or (3 if dtype == torch.float32 else 2)
            settings = (weight.bits, weight.group_size, activations.value, digits, options.min_tokens)
            settings = (*settings, weight.levels.value, rounded_with)
        node = entry.graph.call_function(target, (x, *arguments, *settings))
        node.meta = dict(product.node.meta)
        if dtype != product.node.meta["val"].dtype:
            node.meta["val"] = node.meta["val"].to(dtype)
            node = new_call(entry.graph, _aten.to.dtype, node, product.node.meta["val"].dtype)
    replace(entry, product.node, node)
    program.layers[name] = LayerSource(lambda: weight, None if bias is None else (lambda: bias), (name,))
    if all(row.name != name for row in program.report.layers):
        mode = mode_name(weight.scheme, activations)
        row = LayerRow(
            name, weight.shape, "graph", str(weight.scheme), activations.value, mode, reason=reason
        )
        program.report.layers.append(row)


def _fixed_state(entry: ExportedProgram, name: str, fixed: torch.Tensor) -> Node:
    """State that holds it; a layer that is called twice may have two."""
    placed, count = added_state(entry), 1
    while (key := f"{name}.fixed{'' if count == 1 else f'_{count}'}") in placed:
        if same(entry.state_dict[key], fixed):
            return placed[key]
        count += 1
    return add_state(entry, key, fixed)


def _free_name(program: Program, weight: Weight, bias: torch.Tensor | None) -> str:
    """The layer's name, with a number where its module holds another weight too."""
    name, count = weight.name, 1
    while name in program.layers:
        source = program.layers[name]
        if source.weight().same_values(weight) and same(source.bias() if source.bias else None, bias):
            break
        count += 1
        name = f"{weight.name}_{count}"
    return name


def _layer_name(entry: ExportedProgram, product: Product) -> str:
    """The module the weight's state belongs to, e.g. ``model.layers.0.q_proj`` for ``...q_proj.qweight``."""
    names, seen, todo, owners = state_names(entry), set(), [product.weight], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo.extend(node.all_input_nodes)
        if node.name in names:
            # torch keeps what a parameter is computed from below its module, in ``parametrizations``
            owners.add(names[node.name].rpartition(".")[0].partition(".parametrizations.")[0])
    owners.discard("")
    return min(owners, key=len) if owners else module_path(product.node) or product.node.name


def _left_in_float(
    program: Program,
    entry: ExportedProgram,
    name: str,
    product: Product,
    reason: str = "",
) -> None:
    kind, shape = product.weight.meta["val"].dtype, product.weight.meta["val"].shape
    floating = (
        "its weight is float"
        if kind.is_floating_point
        else "it is a product of integers, scaled unlike a linear's"
    )
    outputs, inputs = (shape[1], shape[0]) if product.transposed else (shape[0], shape[1])
    if all(row.name != name for row in program.report.layers):
        storage = f"graph {str(kind).removeprefix('torch.')}"
        row = LayerRow(
            name, (int(outputs), int(inputs)), storage, "float", "float", reason=reason or floating
        )
        program.report.layers.append(row)
