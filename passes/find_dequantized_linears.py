"""Finds linears whose weight a graph dequantizes by plain operations, and makes them ``halfbyte::linear``.

The packing is not matched: whatever shifts and masks unpack the codes, they depend on state alone, so the codes,
zero points and scales are evaluated and then checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from halfbyte.passes.grouping import find_groups
from halfbyte.passes.program import (
    LayerSource,
    Program,
    add_state,
    added_state,
    drop_dead_state,
    integer_weight,
    replace,
    state_names,
)
from halfbyte.passes.report import LayerRow, Refusal
from halfbyte.passes.scheme import Activations, mode_name
from halfbyte.passes.state_eval import StateEval
from halfbyte.passes.weight import QuantTensor, same

_aten = torch.ops.aten
_ADD = (_aten.add.Tensor,)
_SUB = (_aten.sub.Tensor, _aten.sub.Scalar)
_MUL = (_aten.mul.Tensor, _aten.mul.Scalar)
# What may stand between the dequantized weight and the matrix product: nothing that changes a value beyond a cast.
_RESHAPES = (
    _aten.t.default,
    _aten.numpy_T.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
    _aten.contiguous.default,
    _aten.clone.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.detach_.default,
)
_CASTS = (_aten.to.dtype, _aten._to_copy.default, _aten.to.device, _aten.to.dtype_layout)


@dataclass(frozen=True)
class _Product:
    """x @ weight^T + bias, whatever operation spells it. ``transposed``: the weight operand is [K, N]."""

    node: torch.fx.Node
    x: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    transposed: bool


@dataclass(frozen=True)
class _Dequantized:
    """[N, K] each: integer codes, and what turns them into a weight."""

    codes: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None


@dataclass(frozen=True)
class FindDequantizedLinears:
    """Rewrites every linear of the form x @ ((codes - zero) * scale), or codes * scale + minimum.

    Codes must be integers 0..15 (or -8..7), or 8 bits wide (0..255 or -128..127); scales and zero points must be
    constant in groups of a multiple of 8 inputs, in any order of the inputs (an activation order becomes one
    permutation of x). What does not fit stays as it is, and a refusal says why.

    Attributes:
        activations: what the new linears do to their input.
        digits: digit planes of the float path; 0 chooses 3 for float32 graphs and 2 for 16-bit ones.
        min_tokens: see ``halfbyte::linear``.
    """

    activations: Activations = Activations.NONE
    digits: int = 0
    min_tokens: int = 0
    name: str = "find-dequantized-linears"

    def run(self, program: Program) -> int:
        found = 0
        if program.empty:
            return (
                0  # made by a checkpoint reader: the linears are in place, and there is nothing to evaluate
            )
        for entry in program.entries.values():
            evaluate = StateEval(entry)
            for product in list(_products(entry, evaluate)):
                found += self._rewrite(program, entry, evaluate, product)
            drop_dead_state(entry)
        return found

    def _rewrite(
        self, program: Program, entry: ExportedProgram, evaluate: StateEval, product: _Product
    ) -> int:
        name = _layer_name(entry, product)
        match = _dequantization(evaluate, product)
        if match is None:
            _left_in_float(program, entry, name, product)
            return 0
        weight = _regroup(name, match, self.activations)
        if isinstance(weight, Refusal):
            program.report.refusals.append(weight)
            _left_in_float(program, entry, name, product, reason=f"found {weight.found}")
            return 0
        _insert(program, entry, product, weight, self)
        return 1


def _products(entry: ExportedProgram, evaluate: StateEval) -> list[_Product]:
    out = []
    for node in entry.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _aten.linear.default:
            bias = node.args[2] if len(node.args) > 2 else None
            product = _Product(node, node.args[0], node.args[1], bias, False)
        elif node.target in (_aten.mm.default, _aten.matmul.default):
            product = _Product(node, node.args[0], node.args[1], None, True)
        elif node.target is _aten.addmm.default and not node.kwargs:
            product = _Product(node, node.args[1], node.args[2], node.args[0], True)
        else:
            continue
        value = evaluate(product.weight)
        if value is None or value.dim() != 2 or evaluate(product.x) is not None:
            continue
        if product.bias is not None and evaluate(product.bias) is None:
            continue
        out.append(product)
    return out


def _strip(node: object, evaluate: StateEval) -> tuple[object, list[torch.fx.Node]]:
    """Follows reshapes and casts back to what they reshape; also gives the nodes passed, last first."""
    passed = []
    while isinstance(node, torch.fx.Node) and node.target in (*_RESHAPES, *_CASTS):
        passed.append(node)
        node = node.args[0]
    return node, passed


def _dequantization(evaluate: StateEval, product: _Product) -> _Dequantized | None:
    root, passed = _strip(product.weight, evaluate)
    if not isinstance(root, torch.fx.Node):
        return None
    minimum: object = None
    if root.target in _ADD and len(root.args) == 2 and not root.kwargs:
        for product_side, other in (root.args, root.args[::-1]):
            inner, between = _strip(product_side, evaluate)
            if isinstance(inner, torch.fx.Node) and inner.target in _MUL and not between:
                root_mul, minimum = inner, other
                break
        else:
            return None
    elif root.target in _MUL:
        root_mul = root
    else:
        return None
    for side, scale in (root_mul.args, root_mul.args[::-1]):
        inner, between = _strip(side, evaluate)
        codes: torch.Tensor | None = _value(evaluate, side)
        zero: torch.Tensor | None = torch.tensor(0)
        if (
            isinstance(inner, torch.fx.Node)
            and inner.target in _SUB
            and len(inner.args) == 2
            and not inner.kwargs
        ):
            shape = evaluate(inner).shape
            operands = [_value(evaluate, part) for part in inner.args]
            codes, zero = (
                None if part is None else _replay(part.expand(shape).contiguous(), between)
                for part in operands
            )
        parts = [codes, zero, _value(evaluate, scale), _value(evaluate, minimum)]
        like = evaluate(root)
        if any(part is not None and not _broadcasts(part, like) for part in parts):
            continue
        full = [
            None if part is None else _replay(part.expand(like.shape).contiguous(), passed) for part in parts
        ]
        if product.transposed:
            full = [None if part is None else part.T for part in full]
        code, offset, factor, least = full
        assert code is not None and offset is not None and factor is not None
        if _whole(code) and _whole(offset) and bool((code != code[:1, :1]).any()):
            return _Dequantized(code.to(torch.int64), offset.to(torch.int64), factor, least)
    return None


def _value(evaluate: StateEval, part: object) -> torch.Tensor | None:
    if part is None:
        return None
    return evaluate(part) if isinstance(part, torch.fx.Node) else torch.as_tensor(part)


def _broadcasts(part: torch.Tensor, like: torch.Tensor) -> bool:
    try:
        return torch.broadcast_shapes(part.shape, like.shape) == like.shape
    except RuntimeError:
        return False


def _replay(value: torch.Tensor, passed: list[torch.fx.Node]) -> torch.Tensor:
    """Applies the reshapes between the multiplication and the product, but not the casts."""
    for node in reversed(passed):
        if node.target in _RESHAPES:
            value = node.target(value, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return value


def _whole(values: torch.Tensor) -> bool:
    return not values.is_floating_point() or bool((values == values.round()).all())


def _regroup(name: str, match: _Dequantized, activations: Activations) -> QuantTensor | Refusal:
    codes, zero = match.codes, match.zero
    low, high = int(codes.min()), int(codes.max())
    bits = 4 if low >= -8 and high <= 15 and high - low <= 15 else 8
    if bits == 8 and activations is Activations.FP8:
        advice = "use int8 or float activations, or quantize the layer to 4 bits"
        return Refusal(name, "8-bit codes under fp8 activations", "4-bit codes", advice)
    if match.minimum is None and low < 0:
        codes, zero = codes + 2 ** (bits - 1), zero + 2 ** (bits - 1)
    for label, values in (("codes", codes), ("zero points", zero)):
        if int(values.min()) < 0 or int(values.max()) >= 2**bits:
            return Refusal(
                name,
                f"{label} from {int(values.min())} to {int(values.max())} beside {bits}-bit codes",
                "4-bit codes and zero points (0 to 15, or -8 to 7), or 8-bit ones (0 to 255, or -128 to 127)",
                "leave the layer in float, or quantize it to 4 or 8 bits",
            )
    if match.minimum is not None and bool(zero.any()):
        return Refusal(
            name, "both a zero point and a minimum", "one of the two", "fold the zero point into the minimum"
        )
    if not bool(torch.isfinite(match.scale).all()):
        return Refusal(name, "scales that are NaN or Inf", "finite scales", "quantize the layer again")
    scale = match.scale if match.scale.dtype in (torch.float16, torch.bfloat16) else match.scale.float()
    offset = zero if match.minimum is None else match.minimum
    grouping = find_groups(torch.cat([scale.double(), offset.double()]))
    if grouping.group_size % 8 and grouping.group_size != codes.shape[1]:
        return Refusal(
            name,
            f"scales that change every {grouping.group_size} inputs",
            "groups of a multiple of 8 inputs, or one group per output",
            "leave the layer in float, or quantize it with such a group size",
        )
    if grouping.permutation is not None:
        codes, zero, scale = (part[:, grouping.permutation] for part in (codes, zero, scale))
        offset = offset[:, grouping.permutation]
    first = grouping.first
    symmetric = match.minimum is None and bool((zero == 2 ** (bits - 1)).all())
    return QuantTensor(
        name,
        codes.to(torch.uint8).contiguous(),
        scale[:, first].contiguous(),
        grouping.group_size,
        None if symmetric or match.minimum is not None else zero[:, first].to(torch.uint8).contiguous(),
        None if match.minimum is None else offset[:, first].to(scale.dtype).contiguous(),
        grouping.permutation,
        bits,
    )


def _insert(
    program: Program,
    entry: ExportedProgram,
    product: _Product,
    weight: QuantTensor,
    options: FindDequantizedLinears,
) -> None:
    dtype = product.node.meta["val"].dtype
    digits = options.digits or (3 if dtype == torch.float32 else 2)
    bias = None if product.bias is None else StateEval(entry)(product.bias).float()
    name = _free_name(program, weight, bias)
    placed = added_state(entry)

    def state(tensor: str, value: torch.Tensor | None) -> torch.fx.Node | None:
        known = placed.get(f"{name}.{tensor}")  # of the same layer called twice
        return known if known is not None or value is None else add_state(entry, f"{name}.{tensor}", value)

    arguments = [
        state("codes", weight.packed()),
        state("scale", weight.scale),
        state("zero", weight.zero),
        state("minimum", weight.minimum),
        state("bias", bias),
    ]
    order = state("permutation", weight.permutation)
    x = product.x
    with entry.graph.inserting_before(product.node):
        if order is not None:
            x = entry.graph.call_function(_aten.index_select.default, (product.x, -1, order))
            x.meta = {"val": product.x.meta["val"]}
        settings = (weight.bits, weight.group_size, options.activations.value, digits, options.min_tokens)
        node = entry.graph.call_function(torch.ops.halfbyte.linear.default, (x, *arguments, *settings))
    node.meta = dict(product.node.meta)
    replace(entry, product.node, node)
    program.layers[name] = LayerSource(lambda: weight, None if bias is None else (lambda: bias), (name,))
    if all(row.name != name for row in program.report.layers):
        mode = mode_name(weight.scheme, options.activations)
        row = LayerRow(name, weight.shape, "graph", str(weight.scheme), options.activations.value, mode)
        program.report.layers.append(row)


def _free_name(program: Program, weight: QuantTensor, bias: torch.Tensor | None) -> str:
    """The layer's name, with a number where its module holds another weight too."""
    name, count = weight.name, 1
    while name in program.layers:
        source = program.layers[name]
        if integer_weight(source).same_values(weight) and same(source.bias() if source.bias else None, bias):
            break
        count += 1
        name = f"{weight.name}_{count}"
    return name


def _layer_name(entry: ExportedProgram, product: _Product) -> str:
    """The module the weight's state belongs to, e.g. ``model.layers.0.q_proj`` for ``...q_proj.qweight``."""
    names, seen, todo, owners = state_names(entry), set(), [product.weight], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo.extend(node.all_input_nodes)
        if node.name in names:
            owners.add(names[node.name].rpartition(".")[0])
    owners.discard("")
    return min(owners, key=len) if owners else product.node.name


def _left_in_float(
    program: Program,
    entry: ExportedProgram,
    name: str,
    product: _Product,
    reason: str = "its weight is float",
) -> None:
    shape = product.weight.meta["val"].shape
    outputs, inputs = (shape[1], shape[0]) if product.transposed else (shape[0], shape[1])
    if all(row.name != name for row in program.report.layers):
        dtype = str(product.weight.meta["val"].dtype).removeprefix("torch.")
        row = LayerRow(name, (int(outputs), int(inputs)), f"graph {dtype}", "float", "float", reason=reason)
        program.report.layers.append(row)
