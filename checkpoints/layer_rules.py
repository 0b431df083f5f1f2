"""Rules of a quantization configuration that change or exclude single layers, by name or by pattern."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]

from halfbyte.errors import CheckpointError

_MAX_PATTERN = 2000
_SECONDS = 0.5
_CLASSES = ("linear", "module")  # and the class it is derived from


class Match(enum.Enum):
    """How a rule's text is compared with a layer's name."""

    EXACT = "exact"
    SUFFIX = "suffix"  # the name ends with "." + text
    PARTS = "parts"  # the dotted parts of text stand in the name, one after the other
    START = "start"  # a regular expression, anchored at the start (re.match)
    SEARCH = "search"  # a regular expression, anywhere (re.search)
    PREFIX = "prefix"  # the name is the text, or begins with text + "."
    CLASS = "class"  # the name of the module's class: every layer is a torch.nn.Linear


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        match: how `text` is compared.
        text: a name or a regular expression.
        override: what changes for a layer it fits, e.g. ``{"bits": 8}``; None: the layer is not quantized.
        where: the configuration, for errors.
    """

    match: Match
    text: str
    override: dict[str, Any] | None
    where: str

    def fits(self, name: str) -> bool:
        """Whether the rule is about the layer `name`.

        Raises:
            CheckpointError: `text` is no regular expression, or takes too long: a pattern from an untrusted
                file can be made to run for ever.
        """
        if self.match is Match.EXACT:
            return name == self.text
        if self.match is Match.PREFIX:
            return name == self.text or name.startswith(self.text + ".")
        if self.match is Match.CLASS:
            return self.text.lower() in _CLASSES
        if self.match is Match.SUFFIX:
            return name.endswith("." + self.text)
        if self.match is Match.PARTS:
            return f".{self.text.strip('.')}." in f".{name}."
        if len(self.text) > _MAX_PATTERN:
            raise self._bad(f"{len(self.text)} characters")
        compare = regex.match if self.match is Match.START else regex.search
        try:
            return compare(self.text, name, timeout=_SECONDS) is not None
        except TimeoutError:
            raise self._bad(f"more than {_SECONDS} s for one name") from None
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise self._bad(str(error)) from None

    def _bad(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"the pattern {self.text[:200]!r} cannot be used",
            where=self.where,
            found=found[:200],
            accepted=f"a regular expression of at most {_MAX_PATTERN} characters",
        )


def first_fit(rules: Sequence[Rule], name: str) -> Rule | None:
    """The first rule, in order, that fits the layer `name`."""
    return next((rule for rule in rules if rule.fits(name)), None)
