"""One module of several targets: what iree-compile made for each, side by side, and functions that ask the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from halfbyte.errors import CompilerError

# Where compilations for single targets end, and that of the joined module begins: executables are in their last form.
END_FLAG, START_FLAG = "--compile-to=hal", "--compile-from=hal"


@dataclass(frozen=True)
class Part:
    """A module for one target.

    Attributes:
        target: prefix of its symbols.
        device: pattern of IREE's names of the devices that run it: ``vulkan``, ``local*``.
        text: MLIR, as far as `END_FLAG` takes it.
    """

    target: str
    device: str
    text: str


def join(parts: Sequence[Part]) -> str:
    """Joins modules that have the same public functions.

    The first device of the process decides which target's code runs: its functions are called, and its initializers
    alone make executables and load parameters.

    Raises:
        CompilerError: the functions differ.
    """
    with ir.Context(), ir.Location.unknown():
        modules = [ir.Module.parse(part.text) for part in parts]
        signatures = [_make_private(module, part) for module, part in zip(modules, parts, strict=True)]
        if any(signature != signatures[0] for signature in signatures):
            raise CompilerError(
                "programs of several targets have other functions",
                found="; ".join(f"{p.target}: {s}" for p, s in zip(parts, signatures, strict=True))[:1000],
                advice="compile without --fat",
            )
        entries = [_entry(name, *signature, parts) for name, signature in signatures[0].items()]
        called = [
            f'util.func private @"{part.target}_{name}"({", ".join(takes)}) -> ({", ".join(gives)})'
            for part in parts
            for name, (takes, gives, _) in signatures[0].items()
        ]
        made = ir.Module.parse("module {\n" + "\n".join([*entries, *called]) + "\n}")
        # Into one module, printed as a whole: what large constants hold stands at the end of a module's text.
        whole, *others = modules
        for op in [op for other in others for op in other.body.operations]:
            op.detach_from_parent()
            whole.body.append(op)
        for op in list(made.body.operations)[: len(entries)]:
            op.detach_from_parent()
            whole.body.append(op)
        if not whole.operation.verify():
            raise CompilerError("the module is malformed after joining the targets")
        return str(whole)


_Signature = tuple[tuple[str, ...], tuple[str, ...], str]


def _make_private(module: Any, part: Part) -> dict[str, _Signature]:
    """Gives all symbols the part's prefix, guards the initializers, and returns what was public.

    Returns:
        By function: types of arguments and results, and what it tells of itself to callers.
    """
    public = {}
    for op in list(module.body.operations):
        if op.operation.name == "util.initializer":
            _guard(op.operation, part)
        if "sym_name" not in op.attributes:
            continue
        old = ir.StringAttr(op.attributes["sym_name"]).value
        if op.operation.name == "util.func" and _is_public(op):
            kind = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
            told = {name: str(op.attributes[name]) for name in op.attributes if name.startswith("iree.")}
            about = ", ".join(f"{name} = {value}" for name, value in sorted(told.items()))
            public[old] = (tuple(map(str, kind.inputs)), tuple(map(str, kind.results)), about)
            op.attributes["sym_visibility"] = ir.StringAttr.get("private")
            for name in told:
                del op.attributes[name]
        new = f"{part.target}_{old}"
        ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
        ir.SymbolTable.set_symbol_name(op, new)
    return public


def _is_public(function: Any) -> bool:
    hidden = "sym_visibility" in function.attributes
    return not hidden or ir.StringAttr(function.attributes["sym_visibility"]).value == "public"


_FIRST_DEVICE = "%zero = arith.constant 0 : index\n%device = hal.devices.get %zero : !hal.device\n"


def _asked(part: Part) -> str:
    """Whether the first device is of the part's kind, as %ours_<target>."""
    value = f"%known_{part.target}, %ours_{part.target}"
    key = f'key("hal.device.id" :: "{part.device}")'
    return f"{value} = hal.device.query<%device : !hal.device> {key} : i1, i1 = false\n"


def _guard(initializer: Any, part: Part) -> None:
    """Leaves an initializer at once on devices of another kind."""
    blocks = initializer.regions[0].blocks
    first, last = blocks[0], blocks[len(blocks) - 1]
    question = ir.Module.parse(
        "module { util.initializer {\n" + _FIRST_DEVICE + _asked(part) + "util.return\n} }"
    )
    asking = first.create_before()
    *ops, leave = question.body.operations[0].regions[0].blocks[0].operations
    for op in (*ops, leave):
        op.detach_from_parent()
    for op in ops:
        asking.append(op)
    end = last.create_after()
    end.append(leave)
    ours = ops[-1].operation.results[1]
    sizes = ir.DenseI32ArrayAttr.get([1, 0, 0])
    with ir.InsertionPoint(asking):
        ir.Operation.create(
            "cf.cond_br",
            operands=[ours],
            successors=[first, end],
            attributes={"operandSegmentSizes": sizes},
        )


def _entry(
    name: str, inputs: Sequence[str], results: Sequence[str], about: str, parts: Sequence[Part]
) -> str:
    """The public function that calls that of the device's target."""
    arguments = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(inputs))
    given = ", ".join(f"%a{i}" for i in range(len(inputs)))
    takes, gives = ", ".join(inputs), ", ".join(results)
    lines = [f'util.func public @"{name}"({arguments}) -> ({gives}) attributes {{{about}}} {{', _FIRST_DEVICE]
    for part in parts:
        to = part.target
        made = ", ".join(f"%{to}_{i}" for i in range(len(results)))
        lines += [f"{_asked(part)}cf.cond_br %ours_{to}, ^{to}, ^not_{to}", f"^{to}:"]
        call = f'util.call @"{to}_{name}"({given}) : ({takes}) -> ({gives})'
        lines += [f"{made} = {call}" if results else call, _returned(made, gives), f"^not_{to}:"]
    known = ", ".join(part.target for part in parts)
    none = [f"%none{i}" for i in range(len(results))]
    lines += [
        "%unavailable = arith.constant 14 : i32",
        f'util.status.check_ok %unavailable, "the program is for devices of other kinds: {known}"',
        *(f"{value} = util.null : {kind}" for value, kind in zip(none, results, strict=True)),
        _returned(", ".join(none), gives),
    ]
    return "\n".join([*lines, "}"])


def _returned(values: str, types: str) -> str:
    return f"util.return {values} : {types}" if values else "util.return"
