"""gpt-oss as it was published, experts in MXFP4: compiled, run, verified."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from made_experts import made_model, quantize
from made_fp4 import random_mxfp4, write_mxfp4_experts

import halfbyte
from halfbyte.runtime.logits import all_logits
from halfbyte.verify_model import verify

TOKENS = [3, 9, 31, 0, 17, 8, 8, 40, 1, 2]


def test_logits_are_those_of_transformers(tmp_path: Path, portable: str) -> None:
    made = made_model("gpt_oss")
    quantize(made, lambda name: ".experts." in name, random_mxfp4)
    folder, out = write_mxfp4_experts(tmp_path / "model", made), tmp_path / "out"
    halfbyte.compile(folder, out, halfbyte.CompileOptions(max_context=32, cpu=portable))
    want, got = made.logits(TOKENS), all_logits(halfbyte.load(out), TOKENS)
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()
    report = json.loads((out / "report.json").read_text())
    rows = {row["name"]: row for row in report["layers"]}
    assert {rows[name]["storage"] for name in made.codes} == {"mxfp4"}
    assert {rows[name]["mode"] for name in made.codes} == {"W4A16"}
    assert {rows[name]["scheme"] for name in made.codes} == {"e2m1 symmetric, group 32, bf16 scales"}
    manifest = json.loads((out / "manifest.json").read_text())
    [archive] = manifest["parameters"]
    path = "model.layers.0.mlp.experts"
    gates = [codes.codes for name, codes in made.codes.items() if re.match(rf"{path}\.\d+\.gate", name)]
    (inner, hidden), up = gates[0].shape, archive["tensors"][f"{path}.up.codes"]["bytes"]
    assert up == len(gates) * 2 * (-(-inner // 64) * 64) * hidden // 2  # half a byte per weight
    found = verify(out, folder, tokens=TOKENS)
    assert found.failures == () and all(check.equal for check in found.layers)
