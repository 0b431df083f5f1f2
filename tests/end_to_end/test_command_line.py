"""inspect, compile and verify as commands: text, JSON, exit codes and their messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import halfbyte
import halfbyte.runtime

Compile = Callable[..., Path]
Main = Callable[..., int]
Captured = pytest.CaptureFixture[str]
DYNAMIC, SMALL, DOWN = "qwen3-gptq-dynamic", "base-gptq", "model.layers.0.mlp.down_proj"


# ---------------------------------------------------------------- inspect


def test_inspect_groups_layers(checkpoints: Path, main: Main, capsys: Captured) -> None:
    assert main("inspect", checkpoints / DYNAMIC) == 0
    out = capsys.readouterr().out
    assert f"{checkpoints / DYNAMIC}: " in out and "qwen3" in out and "hidden_size 128" in out
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()[3:]}
    assert "model.layers.*.self_attn.q_proj x2" in lines
    assert "group 64" in lines["model.layers.0.mlp.gate_proj"]
    assert "group 32" in lines["model.layers.1.mlp.gate_proj"]
    assert "int8 symmetric, group 64" in lines["model.layers.1.mlp.down_proj"]
    assert "float" in lines["model.layers.*.self_attn.o_proj x2"]


def test_inspect_as_json(checkpoints: Path, main: Main, capsys: Captured) -> None:
    assert main("inspect", checkpoints / DYNAMIC, "--json", "--activations", "int8") == 0
    found = json.loads(capsys.readouterr().out)
    expected = json.loads((checkpoints / DYNAMIC / "expected.json").read_text())
    layers = {layer["name"]: layer for layer in found["layers"]}
    for group in expected["quantized"]:
        for name, about in group["layers"].items():
            layer = layers[name]
            assert layer["shape"] == about["shape"]
            assert layer["group_size"] == group["group_size"]
            assert layer["scheme"].split()[0] == group["weight"]
            assert layer["activations"] == "int8"
    assert layers["model.layers.0.self_attn.o_proj"]["scheme"] == "float"
    assert found["config"]["hidden_size"] == 128
    assert found["warnings"] == []


def test_a_model_with_experts(checkpoints: Path, compiled: Compile, main: Main, capsys: Captured) -> None:
    """From inspect to verify: its experts are one row, one check; it generates the same text again."""
    name = "qwen3moe-ct-w4a8"
    assert main("inspect", checkpoints / name) == 0
    out = capsys.readouterr().out
    count = (
        "363 thousand parameters, 216 thousand of them active per token: 2 of 8 experts in each of 2 blocks"
    )
    assert out.splitlines()[2].strip() == count
    assert "model.layers.*.mlp.experts.*.down_proj x16" in out
    assert main("inspect", checkpoints / name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["active"] == 215808
    texts = []
    for _ in range(2):
        assert main("generate", compiled(name), "-p", "Hello there", "--max-tokens", 9) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()
    assert main("verify", compiled(name), checkpoints / name, "--tokens", "3,99,20,7") == 0
    assert "layers: 4 of 4 equal the reference bit for bit" in capsys.readouterr().out


def test_inspect_is_the_function(checkpoints: Path) -> None:
    found = halfbyte.inspect(checkpoints / "llama-gguf-q4_1")
    assert found.architecture == "llama"
    assert {layer.storage for layer in found.layers} >= {"gguf q4_1", "gguf q8_0"}


# ---------------------------------------------------------------- compile


def test_compile_says_what_it_did(
    checkpoints: Path, tmp_path: Path, main: Main, capsys: Captured, portable: str
) -> None:
    out, dump = tmp_path / "out", tmp_path / "dump"
    arguments = ("compile", checkpoints / DYNAMIC, "-o", out, "--max-context", 32, "--activations", "int8")
    assert main(*arguments, "--cpu", portable, "--dump-dir", dump) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split(":")[0] for line in captured.err.splitlines()] == [
        *("load", "rewrite", "export", "import", "compile", "write")
    ]
    counts = Counter[
        tuple[str, str]
    ]()  # a kernel's layers are a line: those with a residual fused are one of their own
    for line in lines:
        if found := re.match(
            r" +(\d+) layers? +(W\wA8) +(.*scales) +halfbyte_gemm_(?:silu_)?w[48]_int8_", line
        ):
            counts[found[2], found[3]] += int(found[1])
    assert counts == {
        ("W4A8", "int4 symmetric, group 32, f16 scales"): 9,
        ("W4A8", "int4 symmetric, group 64, f16 scales"): 2,
        ("W8A8", "int8 symmetric, group 64, f16 scales"): 1,
    }
    left = [line for line in lines if "  float  " in line]
    assert any("model.layers.*.self_attn.o_proj x2" in line for line in left)
    assert lines[-1].startswith(f"run:  cd {out} && iree-run-module ")
    assert sorted(path.name for path in dump.iterdir()) == [
        *(
            "compile.sh",
            "decode.graph.txt",
            "forward.graph.txt",
            "module.mlir",
            "prefill.graph.txt",
            "report.json",
        )
    ]
    assert re.search(r"# File: .*modeling_qwen3\.py:\d+ in forward", (dump / "decode.graph.txt").read_text())
    manifest = json.loads((out / "manifest.json").read_text())
    schema = Path(halfbyte.runtime.__file__).parent / "manifest.schema.json"
    jsonschema.validate(manifest, json.loads(schema.read_text()))
    assert manifest["model"]["max_context"] == 32
    # The line it prints works as it stands.
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    line = lines[-1].removeprefix("run:  ")
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "4x512xf32=" in done.stdout


def test_activations_by_layer(
    checkpoints: Path, tmp_path: Path, main: Main, capsys: Captured, portable: str
) -> None:
    """The last pattern that fits counts; q, k and v read the same input and only those alike are merged."""
    out = tmp_path / "out"
    chosen = ("--activations", "int8", "--layer", "*.mlp.*=none", "--layer", "*.down_proj=fp8")
    chosen += ("--layer", "model.layers.?.self_attn.v_proj=none")
    assert main("inspect", checkpoints / SMALL, "--json", *chosen) == 0
    planned = {row["name"]: row["activations"] for row in json.loads(capsys.readouterr().out)["layers"]}
    arguments = ("compile", checkpoints / SMALL, "-o", out, "--max-context", 16, "--cpu", portable)
    assert main(*arguments, *chosen) == 0
    wanted = {"q": "int8", "k": "int8", "v": "none", "o": "int8", "gate": "none", "up": "none", "down": "fp8"}
    report = json.loads((out / "report.json").read_text())
    for row in report["layers"]:
        leaf = row["name"].rpartition(".")[2].removesuffix("_proj")
        kind = wanted.get(leaf, "float")
        assert row["activations"] == kind == planned.get(row["name"], kind)
        part = {"int8": "_w4_int8_", "fp8": "_w4_e4m3_", "none": "_w4_planes3_", "float": ""}[kind]
        assert part in row["kernel"]
    assert {name.rpartition(".")[2] for name in report["merged"]} == {"q_proj+k_proj", "gate_proj+up_proj"}
    from halfbyte.verify_model import verify

    found = verify(out, checkpoints / SMALL, tokens=[3, 5, 8, 13])
    assert found.failures == ()
    assert all(check.equal for check in found.layers)


def refused(main: Main, capsys: Captured, code: int, *arguments: object) -> str:
    """Runs a command that fails with the code, and gives its message."""
    assert main(*arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    message = captured.err[captured.err.index("error: ") :]
    assert "Traceback" not in message
    return message


def test_usage_errors(checkpoints: Path, tmp_path: Path, main: Main, capsys: Captured) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    model, out = checkpoints / SMALL, tmp_path / "out"
    cases: dict[tuple[object, ...], tuple[str, ...]] = {
        ("-o", out, "--cpu", "z80"): ("--cpu: unknown CPU", "found: z80", "accepted: host, x86-64", "do: "),
        ("-o", out, "--activations", "fp4"): (
            "--activations: no such choice",
            "accepted: auto, int8, fp8, none",
        ),
        ("-o", out, "--layer", "*.mlp.*"): ("--layer: is not of the form PATTERN=KIND", "int8"),
        ("-o", out, "--layer", "*=w4"): ("--layer: is not of the form PATTERN=KIND", "accepted: e.g. "),
        ("-o", out, "--layer", "model.layers.7.mlp.up_proj=int8"): (
            "--layer: the pattern fits no quantized layer",
            "found: model.layers.7.mlp.up_proj=int8",
            "model.layers.0.mlp.up_proj",
        ),
        ("-o", out, "--layer", "lm_head=int8"): ("--layer: the pattern fits no quantized layer",),
        ("-o", out, "--on-unsupported", "x"): ("--on-unsupported: no such choice", "accepted: error, float"),
        ("-o", out, "--target", "tpu"): ("--target: unknown target", "accepted: cpu, cuda, vulkan"),
        ("-o", out, "--dtype", "f8"): ("--dtype: no such choice",),
        ("-o", out, "--kv-cache", "i8"): ("--kv-cache: no such choice",),
        ("-o", out, "--latent-cache", "yes"): ("--latent-cache: no such choice", "auto, on, off"),
        ("-o", out, "--fuse", "norm,all"): ("--fuse: no such fusion", "accepted: all, none, or some of norm"),
        ("-o", out, "--max-context", 100000): (
            "--max-context: the context does not fit",
            "accepted: 2 to 256",
        ),
        ("-o", out, "--max-context", 1): ("accepted: 2 to 256",),
        ("-o", precious): (f"{precious}: the output exists and is not a bundle",),
    }
    for arguments, wanted in cases.items():
        message = refused(main, capsys, 2, "compile", model, *arguments)
        assert all(text in message for text in wanted), message
    assert main("compile", model) == 2
    assert main("compile", model, "-o", out, "--min-tokens", "-1") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


BAD = (
    *("bad-index-outside", "bad-missing-shard", "bad-quant-method-unknown", "bad-qweight-shape"),
    *("bad-scale-nan", "bad-truncated-safetensors"),
)


@pytest.mark.parametrize("name", BAD)
def test_malformed_folders_leave_no_output(
    checkpoints: Path, tmp_path: Path, main: Main, capsys: Captured, name: str
) -> None:
    expected = json.loads((checkpoints / name / "expected.json").read_text())
    message = refused(
        main, capsys, 3, "compile", checkpoints / name, "-o", tmp_path / "out", "--max-context", 64
    )
    assert all(text in message for text in expected["error_must_name"]), message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["nothing-there", "README.md"])
def test_what_is_no_checkpoint(
    checkpoints: Path, tmp_path: Path, main: Main, capsys: Captured, path: str
) -> None:
    for command in (("inspect",), ("compile", "-o", tmp_path / "out")):
        message = refused(main, capsys, 3, command[0], checkpoints / path, *command[1:])
        assert path in message
    assert list(tmp_path.iterdir()) == []


def test_bits_that_contradict_the_tensors(
    checkpoints: Path, tmp_path: Path, main: Main, capsys: Captured
) -> None:
    code = main("compile", checkpoints / "bad-bits-3", "-o", tmp_path / "out")
    assert code in (3, 4)
    assert "bits" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unequal(checkpoints: Path, tmp_path: Path) -> Path:
    """A checkpoint of which one layer has groups of unequal size: readable, but not as int4."""
    folder = tmp_path / "unequal"
    shutil.copytree(checkpoints / SMALL, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.g_idx"] = tensors[f"{DOWN}.g_idx"].copy()
    tensors[f"{DOWN}.g_idx"][3] = 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_layers_that_cannot_be_compiled(
    unequal: Path, tmp_path: Path, main: Main, capsys: Captured, portable: str
) -> None:
    out = tmp_path / "out"
    message = refused(main, capsys, 4, "compile", unequal, "-o", out, "--max-context", 16)
    lines = message.splitlines()
    assert lines[0] == f"error: {DOWN}: this layer cannot be compiled as asked"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["found", "accepted", "do"]
    assert "--on-unsupported float" in lines[3]
    assert not out.exists()
    assert main("inspect", unequal) == 0
    assert "refused: " in capsys.readouterr().out
    arguments = ("compile", unequal, "-o", out, "--max-context", 16, "--cpu", portable)
    assert main(*arguments, "--on-unsupported", "float") == 0
    assert re.search(r" 1 layer .*float.*dequantized: .*unequal", capsys.readouterr().out)
    report = json.loads((out / "report.json").read_text())
    assert [refusal["layer"] for refusal in report["refusals"]] == [DOWN]
    rows = {row["name"]: row["scheme"] for row in report["layers"]}
    assert rows[DOWN] == "float" and rows["model.layers.0.mlp.up_proj"].startswith("int4")
    from halfbyte.verify_model import verify

    assert verify(out, unequal, tokens=[3, 5, 8, 13]).failures == ()


def test_compiler_errors(checkpoints: Path, tmp_path: Path, main: Main, capsys: Captured) -> None:
    out, dump = tmp_path / "out", tmp_path / "dump"
    arguments = ("compile", checkpoints / SMALL, "-o", out, "--max-context", 16, "--dump-dir", dump)
    message = refused(main, capsys, 5, *arguments, "--iree-flag=--no-such-flag")
    assert "iree-compile failed with exit status" in message
    assert "--no-such-flag" in message and str(dump) in message
    assert "--no-such-flag" in (dump / "compile.sh").read_text()
    assert not out.exists()


def test_as_a_process(checkpoints: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfbyte.cli", "compile", str(checkpoints / "bad-qweight-shape")]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    last = done.stderr[done.stderr.index("error: ") :]
    assert "model.layers.0.mlp.down_proj" in last and "qweight" in last


# ---------------------------------------------------------------- a deployment

FORBIDDEN = ("torch", "torch_mlir", "transformers", "iree.compiler", "safetensors", "gguf", "typer", "rich")


def test_a_bundle_runs_where_nothing_else_is_installed(compiled: Compile, tmp_path: Path) -> None:
    """A copy of the bundle, and a process in which torch, the compiler and the like cannot be imported."""
    folder = tmp_path / "elsewhere"
    shutil.copytree(compiled(SMALL), folder)
    code = f"""
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == other or name.startswith(other + ".") for other in {FORBIDDEN!r}):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from halfbyte.runtime import generate, load
from halfbyte.runtime.logits import all_logits
bundle = load(sys.argv[1], checksums=True)
tokens = list(generate(bundle, [7, 9, 11], max_tokens=5))
print(json.dumps([tokens, all_logits(bundle, [7, 9, 11])[-1].tolist()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tokens, logits = json.loads(done.stdout)
    from halfbyte.runtime import Conversation

    conversation: Any = Conversation(halfbyte.load(compiled(SMALL)))
    want, row = [], conversation.prefill([7, 9, 11])
    np.testing.assert_array_equal(np.array(logits, np.float32), row)
    for _ in range(len(tokens)):
        want.append(int(row.argmax()))
        row = conversation.step(want[-1])
    assert tokens == want


def test_libraries_say_nothing(checkpoints: Path) -> None:
    """transformers, which builds this model, imports torchao where it is installed, which tells of its internals."""
    code = (
        "import sys, halfbyte.cli\n"
        "try:\n    halfbyte.cli.main()\n"
        "finally:\n    print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "inspect", str(checkpoints / "deepseek-w4afp8")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("True\n")
    assert [line for line in done.stderr.splitlines() if not line.startswith("warning: static")] == []
