"""Which operators of a decoder are computed together (``--fuse``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.passes.pipeline import Pass

FUSIONS = ("norm", "glu", "residual", "rotate")


def chosen_fusions(chosen: str) -> frozenset[str]:
    """The fusions of a ``--fuse`` option: ``all``, ``none``, or names of `FUSIONS` separated by commas.

    Raises:
        UsageError: naming the known ones.
    """
    names = {"all": FUSIONS, "none": ()}.get(chosen, tuple(chosen.split(",")))
    unknown = [name for name in names if name not in FUSIONS]
    if unknown:
        raise UsageError(
            "no such fusion",
            where="--fuse",
            found=", ".join(map(repr, unknown)),
            accepted=f"all, none, or some of {', '.join(FUSIONS)}",
        )
    return frozenset(names)


def passes_of(fusions: frozenset[str]) -> list[Pass]:
    """The passes that find them, in order, and the norms that are left."""
    from halfbyte.passes.find_norms import FindNorms
    from halfbyte.passes.fuse_linears import FuseLinears
    from halfbyte.passes.rotate_merged import RotateMerged

    norm, glu, residual, rotate = (name in fusions for name in FUSIONS)
    passes: list[Pass] = []
    if norm or glu or residual:
        passes.append(FuseLinears(norm, glu, residual))
    passes.append(FindNorms())
    if rotate:
        passes.append(RotateMerged())
    return passes
