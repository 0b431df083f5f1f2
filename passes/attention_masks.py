"""What a graph's attention mask is: causal, perhaps with a window, or something else.

Masks come from many operations (transformers' alone from twenty), but one of a single sequence depends on nothing but
the number of tokens. So it is not matched but evaluated, for numbers of tokens that would show a difference: small
ones, the least and the most that the graph takes, and ones above every number that its operations hold, among which
a window's width would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from halfbyte.passes.program import state_names, state_value

_aten: Any = torch.ops.aten
_SMALL = (1, 2, 3, 8, 33, 300)
# A mask of so many tokens has 67 million elements.
_MOST = 8192
# No number of tokens: ends of slices that go to the end, bounds of what has none.
_FAR = 2**31


@dataclass(frozen=True)
class CausalMask:
    """Token i sees the tokens j <= i, and of these the last ``window``; 0 for all."""

    window: int


def causal_mask(entry: ExportedProgram, mask: Node, tokens: Any) -> CausalMask | str:
    """What a mask is, or why it is none that is known.

    Args:
        entry: the program.
        mask: bool (True: seen), or float and added to the scores; [.., T, T].
        tokens: T, a number or symbol.
    """
    held = _Held(entry, mask)
    if held.inputs:
        return f"its mask depends on the input {held.inputs[0]}"
    low, high = _bounds(entry, tokens)
    if (high is None or high > _MOST) and any(number > _MOST for number in held.numbers):
        return f"its mask holds the number {held.numbers[-1]}; masks are tried up to {_MOST} tokens"
    telling = {*_SMALL, low, high or low, *(number + 3 for number in held.numbers)}
    counts = {min(max(count, low), _MOST if high is None else high) for count in telling}
    widths = {count: _window(held.evaluate(tokens, count), count) for count in counts if count <= _MOST}
    window = max((width for width in widths.values() if width is not None), default=0)
    # As many tokens as a window is wide, or fewer, do not show it.
    if not widths or any(width != (window if count > window else 0) for count, width in widths.items()):
        return "it has a mask of its own; causal ones are accepted, also with one window"
    return CausalMask(window)


def _bounds(entry: ExportedProgram, tokens: Any) -> tuple[int, int | None]:
    """The least and the most tokens that a graph takes; None for any number."""
    if isinstance(tokens, int):
        return tokens, tokens
    bounds = entry.range_constraints.get(tokens.node.expr)
    if bounds is None:
        return 1, None
    high = int(bounds.upper) if bounds.upper < _FAR else None
    return max(int(bounds.lower), 1), high


def _window(mask: torch.Tensor | None, count: int) -> int | None:
    """0 for a causal mask of ``count`` tokens, or the width of its window; None for anything else."""
    if mask is None or tuple(mask.shape[-2:]) != (count, count) or mask.numel() != count * count:
        return None
    seen = mask.reshape(count, count)
    if seen.is_floating_point():
        hidden = seen <= torch.finfo(seen.dtype).min
        if not bool(((seen == 0) | hidden).all()):
            return None
        seen = ~hidden
    elif seen.dtype is not torch.bool:
        return None
    width = int(seen[-1].sum())
    wanted = torch.ones(count, count, dtype=torch.bool).tril_().triu_(1 - width)
    if width == 0 or not torch.equal(seen, wanted):
        return None
    return 0 if width == count else width


class _Held:
    """The part of a graph that a mask comes from.

    Attributes:
        inputs: what it depends on beside numbers of tokens and state.
        numbers: the integers in it above 2, sizes of its state among them.
    """

    def __init__(self, entry: ExportedProgram, mask: Node) -> None:
        self._mask = mask
        names = state_names(entry)
        self._state: dict[Node, torch.Tensor] = {}
        self.inputs: list[str] = []
        numbers: set[int] = set()
        seen: set[Node] = set()
        todo = [mask]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder" and node.name in names:
                self._state[node] = value = state_value(entry, names[node.name]).detach()
                numbers.update(value.shape)
            elif node.op != "call_function":
                self.inputs.append(node.name)
            elif node.target is not _aten.sym_size.int:
                todo += node.all_input_nodes
                for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
                    if isinstance(leaf, int) and not isinstance(leaf, bool):
                        numbers.add(abs(leaf))
        self.numbers = sorted(number for number in numbers if 2 < number < _FAR)
        self._order = [node for node in mask.graph.nodes if node in seen]

    def evaluate(self, tokens: Any, count: int) -> torch.Tensor | None:
        """The mask of ``count`` tokens, or None where it depends on anything else."""
        values: dict[Node, Any] = dict(self._state)
        for node in self._order:
            if node in values:
                continue
            if node.target is _aten.sym_size.int:
                size = node.meta["val"]
                if isinstance(size, torch.SymInt) and str(size) != str(tokens):
                    return None
                values[node] = count if isinstance(size, torch.SymInt) else int(size)
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            try:
                with torch.no_grad():
                    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, IndexError, TypeError, ValueError):  # there is no mask of so many tokens
                return None
        return values[self._mask]
