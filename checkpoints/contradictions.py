"""Where a configuration and the tensors of a checkpoint say different things."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

_SHOWN = 5


@dataclass
class Contradictions:
    """Where configuration and tensors differ: layers by message, so that many layers give one warning."""

    layers: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, layer: str, message: str) -> None:
        self.layers[message].append(layer)

    def warnings(self) -> list[str]:
        return [f"{message}: {_listed(names)}" for message, names in self.layers.items()]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
