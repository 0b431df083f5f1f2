"""Which activations each quantized layer gets: ``--activations`` for all of them, ``--layer`` for some by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.checkpoints import LayerInfo
    from halfbyte.passes.report import Refusal
    from halfbyte.passes.scheme import Activations

CHOICES = ("auto", "int8", "fp8", "none")


@dataclass(frozen=True)
class LayerActivations:
    """What the options say about activations.

    Attributes:
        everywhere: one of `CHOICES`.
        overrides: (pattern, one of `CHOICES`); ``*`` and ``?`` of a pattern stand for any characters, dots too.
            The last that fits a layer's name counts.
    """

    everywhere: str = "auto"
    overrides: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LayerActivations:
        """From the fields ``activations`` and ``layers`` of `CompileOptions`, also as kept in a report.

        Raises:
            UsageError: one that is not of the form PATTERN=KIND.
        """
        return cls(options["activations"], tuple(_parsed(text) for text in options.get("layers", ())))

    def wanted(self, layer: str) -> str:
        """One of `CHOICES` for the layer of this name."""
        fitting = [kind for pattern, kind in self.overrides if fnmatchcase(layer, pattern)]
        return fitting[-1] if fitting else self.everywhere

    def choose(self, layer: LayerInfo) -> Activations:
        """What a quantized layer does to its input.

        Not every weight goes with all activations; `refused` says so, and where that is allowed to change
        numbers the layer keeps float activations.
        """
        from halfbyte.passes.scheme import Activations

        wanted = self.wanted(layer.name)
        chosen = layer.activations if wanted == "auto" else Activations(wanted)
        return chosen if layer.scheme is None or chosen.family in layer.scheme.computed else Activations.NONE

    def refused(self, layer: LayerInfo) -> Refusal | None:
        """Why a quantized layer cannot have the activations asked for, or None."""
        from halfbyte.passes.report import Refusal
        from halfbyte.passes.scheme import Activations

        if layer.scheme is None:
            return None
        wanted = self.wanted(layer.name)
        if wanted == "auto" and layer.refused_activations is not None:
            return layer.refused_activations
        chosen = layer.activations if wanted == "auto" else Activations(wanted)
        if chosen.family in layer.scheme.computed:
            return None
        kinds = [kind.value for kind in layer.scheme.computed]
        advice = (
            f"use --activations {' or '.join(kinds)}, --layer '{layer.name}={kinds[0]}' for this layer alone, or "
            "--on-unsupported float to keep its activations float"
        )
        found = f"{chosen.value} activations for {layer.scheme}"
        return Refusal(layer.name, found, f"activations {' or '.join(kinds)} for such weights", advice)

    def check_patterns(self, layers: Iterable[LayerInfo]) -> None:
        """Raises a `UsageError` for the first pattern that is about no quantized layer."""
        from halfbyte.checkpoints.float_parameters import nearest_names

        quantized = [layer.name for layer in layers if layer.scheme is not None]
        for pattern, kind in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in quantized):
                raise UsageError(
                    "the pattern fits no quantized layer",
                    where="--layer",
                    found=f"{pattern}={kind}"[:200],
                    accepted=f"names such as {', '.join(nearest_names(pattern, quantized))}",
                    advice="halfbyte inspect lists the layers",
                )


def _parsed(text: str) -> tuple[str, str]:
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern or kind not in CHOICES:
        raise UsageError(
            "is not of the form PATTERN=KIND",
            where="--layer",
            found=repr(text)[:200],
            accepted=f"e.g. '*.mlp.*=int8'; kinds are {', '.join(CHOICES)}",
        )
    return pattern, kind
