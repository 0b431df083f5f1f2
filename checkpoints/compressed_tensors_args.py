"""The arguments of one quantizer in a compressed-tensors configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoints.scale_blocks import block_sizes
from halfbyte.errors import CheckpointError

_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_ORDERS: dict[Any, bool] = {
    None: False,
    False: False,
    True: True,
    "group": True,
    "dynamic": True,
    "weight": False,
    "static": False,
}


@dataclass(frozen=True)
class QuantizationArgs:
    """A checked set of arguments.

    Attributes:
        bits: of a value.
        is_float: floating-point values, e.g. e4m3.
        symmetric: no zero points.
        strategy: what shares a scale: ``tensor``, ``channel``, ``group``, ``block``, ``token``, ...
        group_size: inputs per group of the strategy ``group``, else None.
        block: (outputs, inputs) of the strategy ``block``, else None.
        dynamic: scales are made at run time.
        local: some scales are made at run time and others are not.
        act_order: groups are not contiguous, a g_idx says which input is where.
    """

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    dynamic: bool = False
    local: bool = False
    act_order: bool = False

    def __str__(self) -> str:
        kind = f"{'fp' if self.is_float else 'int'}{self.bits}"
        size = {"group": f" of {self.group_size}", "block": f" of {self.block}"}.get(self.strategy, "")
        when = "local" if self.local else "dynamic" if self.dynamic else "static"
        return f"{when} {kind} per {self.strategy}{size}"


def quantization_args(values: Any, where: str) -> QuantizationArgs | None:
    """Checks one object of ``weights``, ``input_activations`` or ``output_activations``; None where there is none.

    Raises:
        CheckpointError: values of a wrong type, or a strategy without its size.
    """
    if values is None:
        return None
    if not isinstance(values, dict):
        raise CheckpointError("is no object", where=where, found=type(values).__name__)
    bits = values.get("num_bits", 8)
    if type(bits) is not int or not 1 <= bits <= 64:
        raise _impossible("num_bits", bits, where, "an integer")
    kind = _one_of(values, "type", ("int", "float"), "int", where)
    dynamic = _one_of(values, "dynamic", (True, False, "local"), False, where)
    group_size = values.get("group_size")
    if group_size is not None and (type(group_size) is not int or group_size == 0 or group_size < -1):
        raise _impossible("group_size", group_size, where, "a positive integer, or -1 for one group per row")
    strategy = values.get("strategy")
    if strategy is None:  # as compressed-tensors fills it in
        strategy = "group" if group_size not in (None, -1) else "channel" if group_size == -1 else None
        strategy = strategy or ("token" if dynamic is True else "tensor")
    strategy = _one_of({"strategy": strategy}, "strategy", _STRATEGIES, "tensor", where)
    if strategy in ("group", "tensor_group") and group_size in (None, -1):
        raise _impossible("group_size", group_size, where, f"a positive integer for strategy {strategy}")
    return QuantizationArgs(
        bits,
        kind == "float",
        _one_of(values, "symmetric", (True, False), True, where),
        strategy,
        group_size if strategy in ("group", "tensor_group") else None,
        block_sizes(values.get("block_structure"), "block_structure", where) if strategy == "block" else None,
        dynamic is True,
        dynamic == "local",
        _ORDERS[_one_of(values, "actorder", tuple(_ORDERS), None, where)],
    )


def _one_of(values: dict[str, Any], key: str, accepted: tuple[Any, ...], default: Any, where: str) -> Any:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, str):
        value = value.lower()
    if not any(value == one and type(value) is type(one) for one in accepted):
        raise _impossible(key, value, where, ", ".join(str(one) for one in accepted))
    return value


def _impossible(key: str, value: Any, where: str, accepted: str) -> CheckpointError:
    return CheckpointError(f"{key} is impossible", where=where, found=repr(value)[:100], accepted=accepted)
