"""Puts our kernels and parameters into an imported module.

Every ``halfbyte`` operator becomes a call of a function that strings dispatches together; every state argument
becomes a load of a global that names a parameter of the archive. After that the arguments of a function are
what its caller gives: tokens, a position, caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from iree.compiler import ir

from halfbyte.errors import CompilerError
from halfbyte.lowering.attention_calls import ATTENTION
from halfbyte.lowering.expert_calls import ExpertsCall, fp8_block_moe_call, moe_call
from halfbyte.lowering.imported_values import (
    Shaped,
    builtin,
    call,
    constant,
    create,
    is_none,
    operators,
    replace,
)
from halfbyte.lowering.importer import Imported
from halfbyte.lowering.kernels.codes import INT8
from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
from halfbyte.lowering.kernels.generator import CacheAppend, Kernel, Quantize, Sample, TopK, render
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.linear_calls import linear_call
from halfbyte.lowering.norm_calls import NORMS
from halfbyte.lowering.parameters import ParameterGroup, Parameters, TensorSpec
from halfbyte.lowering.target_limits import check_experts, check_signature
from halfbyte.lowering.targets.target import Target
from halfbyte.lowering.tensor_pieces import pieces
from halfbyte.passes.program import LayerSource, Program, state_value
from halfbyte.passes.report import LayerRow
from halfbyte.passes.scheme import Activations, mode_name
from halfbyte.passes.weight import Fp8Tensor, quant_tensor, same

SCOPE = "model"
_CALLS = {**ATTENTION, **NORMS}


@dataclass
class Spliced:
    """A module ready for iree-compile.

    Attributes:
        text: MLIR.
        parameters: what the archive must hold.
        kernels: by layer, the kernels that compute it.
        own: rows for the report of the layers that no pass made: the graph itself calls their operator.
    """

    text: str
    parameters: Parameters
    kernels: dict[str, str]
    own: tuple[LayerRow, ...]


def splice(imported: Imported, program: Program, target: Target) -> Spliced:
    """Lowers the halfbyte operators of an imported module for a target and binds its state to parameters."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(imported.text)
        work = _Splicer(imported, program, target)
        for function in [op for op in module.body.operations if op.operation.name == "func.func"]:
            work.function(function)
        helpers = ir.Module.parse("module {\n" + "\n".join(work.helpers.values()) + "\n}")
        start = ir.InsertionPoint.at_block_begin(module.body)
        for op in list(helpers.body.operations):
            op.detach_from_parent()
            start.insert(op)
        if not module.operation.verify():
            raise CompilerError("the module is malformed after splicing the kernels")
        return Spliced(str(module), work.parameters, work.kernels, tuple(work.own.values()))


@dataclass
class _Splicer:
    imported: Imported
    program: Program
    target: Target
    helpers: dict[str, str] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=Parameters)
    kernels: dict[str, str] = field(default_factory=dict)
    own: dict[str, LayerRow] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def function(self, function: Any) -> None:
        entry = ir.StringAttr(function.attributes["sym_name"]).value
        state = self.imported.state[entry]
        signature = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        check_signature(self.target, entry, [*signature.inputs, *signature.results])
        lowerings: Mapping[str, Callable[[str, Any], None]] = {
            "torch.halfbyte.linear": self._linear,
            "torch.halfbyte.fused_linear": self._linear,
            "torch.halfbyte.fp8_block_linear": self._fp8_block_linear,
            "torch.halfbyte.moe": functools.partial(self._experts, moe_call),
            "torch.halfbyte.fp8_block_moe": functools.partial(self._experts, fp8_block_moe_call),
            "torch.halfbyte.cache_append": self._cache_append,
            **dict.fromkeys(_CALLS, self._call),
            "torch.halfbyte.quantize_per_token": self._quantize_per_token,
            "torch.halfbyte.topk": self._topk,
            "torch.halfbyte.sample": self._sample,
        }
        for op in operators(function):
            name = ir.StringAttr(op.attributes["name"]).value
            if name not in lowerings:
                raise CompilerError(
                    "this operator has no lowering",
                    where=f"entry point {entry}",
                    found=name,
                    accepted="core aten operators and the halfbyte operators",
                    advice="decompose it, or express it with aten operators",
                )
            with ir.InsertionPoint(op):
                lowerings[name](entry, op)
        block = function.regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(block):
            for index, name in enumerate(state):
                argument = block.arguments[index]
                if name is not None and any(True for _ in argument.uses):
                    argument.replace_all_uses_with(self._load(entry, name, argument))
        for index in reversed([index for index, name in enumerate(state) if name is not None]):
            block.erase_argument(index)
        kept = [block.arguments[index].type for index in range(len(block.arguments))]
        old = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kept, old.results))
        if "arg_attrs" in function.attributes:
            attrs = list(ir.ArrayAttr(function.attributes["arg_attrs"]))
            rest = [attr for attr, name in zip(attrs, state, strict=True) if name is None]
            function.attributes["arg_attrs"] = ir.ArrayAttr.get(rest)

    # ------------------------------------------------------------ state

    def _load(self, entry: str, name: str, argument: Any) -> Any:
        """A float (or index) tensor of the state, as the torch value the argument was."""
        shaped = Shaped.of(argument)
        stored = "i8" if shaped.dtype == "i1" else shaped.dtype
        source = self.program.tensors.get(name)
        key = self._own_key(entry, name) if source is None else source.key
        size = tuple(0 if d is None else d for d in shaped.shape)
        spec = TensorSpec(key, size, stored)
        value = (lambda: state_value(self.program.entries[entry], name)) if source is None else source.load
        self.parameters.add(key, ParameterGroup((spec,), lambda: {key: pieces(value(), spec)}))
        loaded = self._global(spec)
        if shaped.dtype == "i1":
            loaded = create("arith.trunci", [ir.Type.parse(shaped.type)], [loaded])
        return create("torch_c.from_builtin_tensor", [argument.type], [loaded])

    def _own_key(self, entry: str, name: str) -> str:
        """The state's name, after the entry point's where another has a different tensor of that name."""
        value = state_value(self.program.entries[entry], name)
        kept = self.values.setdefault(name, value)
        return name if kept is value or same(kept, value) else f"{entry}.{name}"

    def _global(self, spec: TensorSpec) -> Any:
        text = f'util.global private @"{spec.key}" = #flow.parameter.named<"{SCOPE}"::"{spec.key}"> : {spec.type}'
        self.helpers.setdefault(f"global {spec.key}", text)
        attributes = {"global": ir.FlatSymbolRefAttr.get(spec.key), "is_immutable": ir.UnitAttr.get()}
        return create("util.global.load", [ir.Type.parse(spec.type)], [], attributes)

    # ------------------------------------------------------------ operators

    def _linear(self, entry: str, op: Any) -> None:
        found = linear_call(self.target, op)
        linear, packing = found.linear, found.linear.packing
        name = self._state_name(entry, found.weight[0]).removesuffix(".codes")
        source = self.program.layers.get(name)
        if source is None:  # a graph that uses the operator itself: its state is the weight
            parts = [None if part is None else self._state(entry, part) for part in found.weight]
            with _own_weight(name):
                shape = (packing.inputs, packing.group_size, packing.bits, packing.levels)
                weight = quant_tensor(name, parts, *shape)
            source = LayerSource(lambda: weight, self._optional(entry, found.bias), (name,))
            kind, mode = linear.activations, mode_name(weight.scheme, linear.activations)
            self.own[name] = LayerRow(name, weight.shape, "graph", str(weight.scheme), kind.value, mode)
        self._call_linear(op, found.given, linear, name, source)

    def _fp8_block_linear(self, entry: str, op: Any) -> None:
        x, weight, scale, bias, *settings = op.operands
        block_outputs, block_inputs, activations = (constant(value) for value in settings)
        shaped, result = Shaped.of(x), Shaped.of(op.results[0])
        inputs, outputs = shaped.shape[-1], result.shape[-1]
        assert inputs is not None and outputs is not None
        name = self._state_name(entry, weight).removesuffix(".codes")
        source = self.program.layers.get(name)
        if source is None:
            parts = (self._state(entry, weight), self._state(entry, scale), block_outputs, block_inputs)
            with _own_weight(name):
                found = Fp8Tensor(name, *parts)
            source = LayerSource(lambda: found, self._optional(entry, bias), (name,))
            mode = mode_name(found.scheme, Activations(activations))
            self.own[name] = LayerRow(name, found.shape, "graph", str(found.scheme), activations, mode)
        quantized, has_bias = activations == "fp8", not is_none(bias)
        linear = self.target.fp8_linear(outputs, inputs, block_inputs, shaped.dtype, has_bias, quantized)
        self._call_linear(op, (x,), linear, name, source)

    def _call_linear(
        self, op: Any, given: Sequence[Any], linear: Linear | Fp8Linear, name: str, source: LayerSource
    ) -> None:
        """A call of the linear's function with ``given``, x first, and its packed weight, in place of the operator."""
        shaped, result = Shaped.of(given[0]), Shaped.of(op.results[0])
        group = self.target.pack(name, linear, source)
        self.parameters.add(name, group)
        for member in source.members:
            self.kernels[member] = linear.label
        self._use(linear.kernels)
        if linear.symbol not in self.helpers:
            self.helpers[linear.symbol] = linear.text()
        wrapper = (
            f"{linear.symbol}_{'x'.join('d' if d is None else str(d) for d in shaped.shape[:-1]) or 'row'}"
        )
        self.helpers[wrapper] = render(
            "as_rows.mlir.j2",
            name=wrapper,
            callee=linear.symbol,
            shape=shaped.shape[:-1],
            count=shaped.count,
            K=shaped.shape[-1],
            N=result.shape[-1],
            io=shaped.dtype,
            residual=isinstance(linear, Linear) and linear.residual,
            weights=(*linear.more, *linear.arguments),
        )
        weights = [self._global(spec) for spec in group.tensors]
        [y] = call(wrapper, [result.type], [*map(builtin, given), *weights])
        replace(op, [y])

    def _experts(self, made: Callable[[Target, Any], ExpertsCall], entry: str, op: Any) -> None:
        """A call of the experts' function with their packed weights, in place of the operator."""
        found = made(self.target, op)
        moe, sides = found.kernels, (found.up, found.down)
        x, ids, factors = list(op.operands)[:3]
        name = self._state_name(entry, sides[0][0]).removesuffix(".up_codes")
        check_experts(self.target, name, moe.experts)
        source = self.program.experts.get(name)
        if source is None:  # a graph that uses the operator itself: its state is the weights
            up, down = ([None if is_none(p) else self._state(entry, p) for p in side] for side in sides)
            with _own_weight(name):
                source = found.own(name, up, down)
                for expert in range(source.experts):
                    for linear in (source.gate, source.up, source.down):
                        linear(expert).weight()  # an error, if it makes no sense
                scheme = source.up(0).weight().scheme
            assert up[0] is not None
            shape = (int(up[0].shape[1]), moe.inputs)
            mode, storage = mode_name(scheme, found.activations), f"graph, {source.experts} experts"
            self.own[name] = LayerRow(name, shape, storage, str(scheme), found.activations.value, mode)
        group = self.parameters.add(name, self.target.pack_experts(name, moe, source))
        self.kernels |= dict.fromkeys(source.members(), moe.label)
        self._use(moe.kernels)
        self.helpers[moe.symbol] = moe.text()
        tokens = Shaped.of(x).shape[0]
        wrapper = f"{moe.symbol}_{'d' if tokens is None else tokens}"
        self.helpers[wrapper] = render(
            "moe_tokens.mlir.j2",
            name=wrapper,
            callee=moe.symbol,
            tokens=tokens,
            data=moe.data,
            weights=moe.arguments,
        )
        given = [builtin(value) for value in (x, ids, factors)]
        [y] = call(wrapper, [Shaped.of(op.results[0]).type], [*given, *map(self._global, group.tensors)])
        replace(op, [y])

    def _state(self, entry: str, value: Any) -> torch.Tensor:
        return state_value(self.program.entries[entry], self._state_name(entry, value))

    def _optional(self, entry: str, value: Any) -> Callable[[], torch.Tensor] | None:
        if is_none(value):
            return None
        found = self._state(entry, value)  # now: the MLIR value will be gone when the archive is written
        return lambda: found

    def _cache_append(self, entry: str, op: Any) -> None:
        cache, rows, _ = (Shaped.of(value) for value in op.operands)
        heads, positions, width = cache.shape
        kernel = CacheAppend(cache.dtype, self.target.platform)
        self._use([kernel])
        count = rows.shape[1]
        name = f"{kernel.symbol}_{heads}x{positions}x{width}_{'d' if count is None else count}"
        self.helpers[name] = render(
            "append.mlir.j2",
            name=name,
            kernel=kernel.symbol,
            io=cache.dtype,
            H=heads,
            S=positions,
            D=width,
            T=count,
        )
        [out] = call(name, [cache.type], [builtin(value) for value in op.operands])
        replace(op, [out])

    def _call(self, entry: str, op: Any) -> None:
        called = _CALLS[ir.StringAttr(op.attributes["name"]).value](self.target, op)
        self._use(called.kernels)
        self.helpers.setdefault(called.symbol, called.text)
        if called.weight is not None and (name := self._known_state(entry, called.weight)) is not None:
            self.kernels.setdefault(name.rpartition(".")[0], called.kernels[0].symbol)
        replace(op, call(called.symbol, list(called.results), [builtin(value) for value in called.operands]))

    def _quantize_per_token(self, entry: str, op: Any) -> None:
        [x] = op.operands
        shaped = Shaped.of(x)
        kernel = Quantize(shaped.dtype, INT8, self.target.platform)
        self._use([kernel])
        name = f"{kernel.symbol}_{'x'.join('d' if d is None else str(d) for d in shaped.shape)}"
        self.helpers[name] = render(
            "quantize_rows.mlir.j2",
            name=name,
            kernel=kernel.symbol,
            shape=shaped.shape[:-1],
            count=shaped.count,
            K=shaped.shape[-1],
            io=shaped.dtype,
        )
        types = [Shaped.of(result).type for result in op.results]
        replace(op, call(name, types, [builtin(x)]))

    def _topk(self, entry: str, op: Any) -> None:
        x, *settings = op.operands
        (rows, width), taken, in_order = Shaped.of(x).shape, *map(constant, settings)
        assert width is not None
        kernel = TopK(width, taken, bool(in_order), Shaped.of(x).dtype, self.target.platform)
        self._use([kernel])
        name = f"{kernel.symbol}_{'d' if rows is None else rows}"
        self.helpers[name] = render(
            "topk_rows.mlir.j2", name=name, kernel=kernel.symbol, M=rows, E=width, k=taken, io=kernel.io
        )
        replace(op, call(name, [Shaped.of(result).type for result in op.results], [builtin(x)]))

    def _sample(self, entry: str, op: Any) -> None:
        [size], kernel = Shaped.of(op.operands[0]).shape, Sample(self.target.platform)
        self._use([kernel])
        name = f"{kernel.symbol}_{size}"
        self.helpers[name] = render("sample_row.mlir.j2", name=name, kernel=kernel.symbol, V=size)
        replace(op, call(name, ["tensor<1xi64>"], [builtin(value) for value in op.operands]))

    def _use(self, kernels: Any) -> None:
        kernel: Kernel
        for kernel in kernels:
            if kernel.symbol not in self.helpers:
                self.helpers[kernel.symbol] = kernel.text()

    def _known_state(self, entry: str, value: Any) -> str | None:
        """The name of a value that is state of the program."""
        try:
            return self.imported.state[entry][ir.BlockArgument(value).arg_number]
        except ValueError:
            return None

    def _state_name(self, entry: str, value: Any) -> str:
        name = self._known_state(entry, value)
        if name is None:
            raise CompilerError(
                "the weight of a halfbyte::linear must be state of the program (a parameter or buffer)",
                where=f"entry point {entry}",
                found=str(value)[:200],
            )
        return name


@contextmanager
def _own_weight(name: str) -> Iterator[None]:
    """What a weight that the graph itself gives to an operator does wrong becomes an error that says so."""
    try:
        yield
    except ValueError as error:
        raise CompilerError(
            "the graph gives a halfbyte operator a weight that makes no sense",
            where=name,
            found=str(error),
            accepted="what the operator's documentation says",
        ) from None
