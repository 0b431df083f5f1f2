"""The matrix products of a graph whose one side is an input and whose other is state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from halfbyte.passes.graph_patterns import CASTS, arguments, calls, only_user, operator_name, strip
from halfbyte.passes.quantized_inputs import QUANTIZE, InputRounding, input_rounding, quantization
from halfbyte.passes.state_eval import StateEval

_aten: Any = torch.ops.aten
_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn)
# Its weight [N, K / 2] is in an order of the CPU's own.
INT4_PACKED = "aten._weight_int4pack_mm_for_cpu"


@dataclass(frozen=True)
class Product:
    """x @ weight^T * factor + bias, whatever operations spell it.

    Attributes:
        node: has the result.
        x: the input, float; or integers, when ``input_scale`` is given.
        weight: the weight operand.
        bias: or None.
        transposed: the weight operand is [K, N].
        factor: what the outputs are multiplied with after the product of codes: broadcasts to [N]. Or None.
        input_scale: what turns an ``x`` of integers into what was rounded: broadcasts to [..., 1]. Or None.
        rounding: how the graph rounds the input, or None where it does not.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    transposed: bool
    factor: Node | None = None
    input_scale: Node | None = None
    rounding: InputRounding | None = None


def find_products(entry: ExportedProgram, evaluate: StateEval) -> list[Product]:
    """All of them, in the order of the graph."""
    found = (_product(node, evaluate) for node in entry.graph.nodes)
    return [product for product in found if product is not None]


def _product(node: Node, evaluate: StateEval) -> Product | None:
    if calls(node, _aten._int_mm.default):
        return _integer_product(node, evaluate)
    if operator_name(node) == INT4_PACKED:
        return _checked(Product(node, node.args[0], node.args[1], None, False), evaluate)  # type: ignore[arg-type]
    if operator_name(node) == "aten._weight_int8pack_mm":
        x, weight, scale = node.args
        return _checked(Product(node, x, weight, None, False, scale), evaluate)  # type: ignore[arg-type]
    if calls(node, _aten.linear.default):
        given = arguments(node)
        product = Product(node, given["input"], given["weight"], given["bias"], False)
    elif calls(node, _aten.mm.default, _aten.matmul.default):
        product = Product(node, node.args[0], node.args[1], None, True)  # type: ignore[arg-type]
    elif calls(node, _aten.addmm.default) and not node.kwargs:
        product = Product(node, node.args[1], node.args[2], node.args[0], True)  # type: ignore[arg-type]
    else:
        return None
    checked = _checked(product, evaluate)
    if checked is None:
        return None
    return _with_factor(replace(checked, rounding=input_rounding(product.x, evaluate)), evaluate)


def _checked(product: Product, evaluate: StateEval) -> Product | None:
    value = evaluate(product.weight)
    if value is None or value.dim() != 2 or evaluate(product.x) is not None:
        return None
    known = (part is None or evaluate(part) is not None for part in (product.bias, product.factor))
    return product if all(known) else None


def _with_factor(product: Product, evaluate: StateEval) -> Product:
    """Takes in the multiplication by the scales of the outputs, where the weight is codes alone."""
    weight = strip(product.weight)[0]
    codes = evaluate(weight.args[0]) if calls(weight, _aten.sub.Tensor) else evaluate(weight)
    user = only_user(product.node)
    if codes.dtype not in _CODES or product.bias is not None or user is None:
        return product
    scale = _other_operand(user, product.node)
    if scale is None or not _scales_outputs(evaluate(scale), product.node):
        return product
    return replace(product, node=user, factor=scale)


def _integer_product(node: Node, evaluate: StateEval) -> Product | None:
    """(q @ codes) * input_scale * factor, in whichever order, for an input rounded to q without zero points."""
    q, weight = node.args
    rounding = quantization(q, evaluate)
    product = _checked(Product(node, q, weight, None, True), evaluate)  # type: ignore[arg-type]
    if rounding is None or product is None:
        return product
    quantized = strip(q)[0]
    assert operator_name(quantized) in QUANTIZE
    given = arguments(quantized)
    zero = given["zero_point"] if "zero_point" in given else given["zero_points"]
    if not rounding.symmetric and not _is_zero(zero, evaluate):
        return product
    wanted = strip(given["scale"] if "scale" in given else given["scales"])[0]
    factor: Node | None = None
    input_scale: Node | None = None
    last = node
    while factor is None or input_scale is None:
        user = only_user(last)
        if user is None:
            return product
        scale = _other_operand(user, last)
        if scale is not None and strip(scale)[0] is wanted and input_scale is None:
            input_scale = scale
        elif scale is not None and factor is None and _scales_outputs(evaluate(scale), node):
            factor = scale
        elif user.target not in CASTS:
            return product
        last = user
    return replace(product, node=last, factor=factor, input_scale=input_scale, rounding=rounding)


def _other_operand(user: Node, node: Node) -> Node | None:
    """What a multiplication multiplies a node with."""
    if not calls(user, _aten.mul.Tensor) or len(user.args) != 2:
        return None
    mine = [argument for argument in user.args if _leads_to(argument, node)]
    others = [argument for argument in user.args if not _leads_to(argument, node)]
    if len(mine) != 1 or not isinstance(others[0], Node):
        return None
    return others[0]


def _leads_to(argument: Any, node: Node) -> bool:
    while calls(argument, *CASTS) and argument is not node:
        argument = argument.args[0]
    return argument is node


def _scales_outputs(value: Any, product: Node) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    outputs = product.meta["val"].shape[-1]
    return value.numel() == 1 or (value.numel() == outputs and value.shape[-1] == outputs)


def _is_zero(zero: Any, evaluate: StateEval) -> bool:
    if zero is None:
        return True
    value = evaluate(zero) if isinstance(zero, Node) else zero
    return value is not None and not bool(torch.as_tensor(value).any())
