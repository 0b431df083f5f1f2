"""What a target cannot compute, said before anything is compiled: no program is to be wrong without a word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halfbyte.errors import UnsupportedLayerError
from halfbyte.lowering.kernels.generator import MOST_EXPERTS
from halfbyte.lowering.targets.target import Target


def check_signature(target: Target, entry: str, types: Iterable[Any]) -> None:
    """Raises UnsupportedLayerError if arguments or results are of a type that the target would replace by another."""
    wide = [text for text in map(str, types) if text.endswith("f64>")]
    if wide and target.demotes_f64:
        raise UnsupportedLayerError(
            f"programs for {target.name} compute no f64",
            where=f"entry point {entry}",
            found=", ".join(wide[:4]),
            accepted="arguments, state and results in f32, f16, bf16 or integers",
            advice="cast them in the graph, or compile for cpu or cuda",
        )


def check_experts(target: Target, name: str, experts: int) -> None:
    """Raises UnsupportedLayerError if a layer has more experts than the target can sort tokens by."""
    if target.platform.is_gpu and experts > MOST_EXPERTS:
        raise UnsupportedLayerError(
            f"too many experts for the shared memory of a {target.name} program",
            where=name,
            found=f"{experts} experts",
            accepted=f"at most {MOST_EXPERTS}",
            advice="compile for cpu",
        )
