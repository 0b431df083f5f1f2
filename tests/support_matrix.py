"""The README's support matrix, made from what the tests run.

python tests/support_matrix.py     rewrites it
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
_ASKED = {
    "int8": ", int8 activations",
    "int8_fixed": ", static int8 activations",
    "int8_affine_f32": ", int8 activations with zero points",
    "fp8": ", e4m3 activations",
}
BEGIN, END = "<!-- made by tests/support_matrix.py -->", "<!-- end of what is made -->"


def support_matrix() -> str:
    """Three Markdown tables: checkpoints that run whole, layers by target, and kernels by instruction set."""
    for folder in (TESTS, TESTS / "end_to_end", TESTS / "lowering"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return "\n".join([*_checkpoints(), "", *_targets(), "", *_kernels()])


def _checkpoints() -> list[str]:
    from test_logits import ASKING, MODELS

    rows = ["| checkpoint | model | quantized layers | left in float |", "|---|---|---|---|"]
    for name in dict.fromkeys([*MODELS, *ASKING]):
        about = json.loads((TESTS / "data/checkpoints" / name / "expected.json").read_text())
        kinds = Counter[str]()
        for group in about["quantized"]:
            kinds[_kind(group)] += len(group["layers"])
        layers = "; ".join(f"{count} {text}" for text, count in sorted(kinds.items()))
        rows.append(f"| {about['format']} | {about['family']} | {layers} | {len(about['unquantized'])} |")
    return rows


def _kind(group: dict[str, Any]) -> str:
    scales = f"{group['scale_dtype'].lower()} scales"
    if group["weight"] == "fp8_e4m3":
        block = group.get("block")
        return f"e4m3, {'x'.join(map(str, block)) + ' blocks' if block else 'channelwise'}, {scales}"
    size = "channelwise" if group["group_size"] in (None, -1) else f"group {group['group_size']}"
    order = ", act-order" if group["act_order"] else ""
    zero = "symmetric" if group["symmetric"] else "asymmetric"
    asked = _ASKED.get(group.get("activation", ""), "")
    return f"{group['weight']} {zero}, {size}, {scales}{order}{asked}"


def _targets() -> list[str]:
    from test_support_grid import ACTIVATIONS, GRID, GROUPS, LAYERS, TARGETS, ZEROS

    cells = " x ".join(f"{{{', '.join(names)}}}" for names in (ZEROS, GROUPS, LAYERS))
    rows = [f"| int4 weights, {cells} | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
    for activations in ACTIVATIONS:
        count = sum(cell.activations == activations for cell in GRID)
        claims = (f" all {count} {claim} |" for claim in TARGETS.values())
        rows.append(f"| {activations} activations |{''.join(claims)}")
    return rows


def _kernels() -> list[str]:
    from kernel_cases import CASES
    from numpy_twin import E4M3
    from test_kernels import VARIANTS

    modes = Counter[str]()
    for case in CASES.values():
        bits, levels = case.weight.bits, case.weight.levels
        of = "" if levels == "integers" else f" of {levels}"
        activations = {1: "int8", E4M3: "e4m3"}.get(case.digits, f"float, {case.digits} planes")
        label = {1: f"W{bits}A8", E4M3: f"W{bits}AFP8"}.get(case.digits, f"W{bits}A16")
        modes[f"{label}{of} ({activations})"] += 1
    bodies = [f"{variant.isa.name} ({variant.cpu})" for variant in VARIANTS]
    rows = [f"| layers compared | {' | '.join(bodies)} |", "|---" * (len(bodies) + 1) + "|"]
    return [*rows, *(f"| {mode} |{f' {count} |' * len(bodies)}" for mode, count in sorted(modes.items()))]


def rewritten(text: str) -> str:
    """The README with the matrix of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{support_matrix()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
