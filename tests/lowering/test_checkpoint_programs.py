"""What a compiled checkpoint's program is made of: seen in the module, the archive and the compiler's own dumps."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import halfbyte
from halfbyte.lowering.kernels.isa import AVX512VNNI
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime import Bundle

NAME = "base-gptq"


@dataclass(frozen=True)
class Dumped:
    """A bundle and everything its compilation can tell."""

    bundle: Bundle
    module: str
    executables: Path
    statistics: dict[str, Any]
    report: dict[str, Any]


def compile_with_dumps(checkpoints: Path, folder: Path, **options: Any) -> Dumped:
    flags = (
        f"--iree-hal-dump-executable-files-to={folder / 'executables'}",
        "--iree-scheduling-dump-statistics-format=json",
        f"--iree-scheduling-dump-statistics-file={folder / 'statistics.json'}",
    )
    chosen = halfbyte.CompileOptions(cache=False, dump_dir=folder / "dump", iree_flags=flags, **options)
    made = halfbyte.compile(checkpoints / NAME, folder / "bundle", chosen)
    return Dumped(
        halfbyte.load(made.path),
        (folder / "dump" / "module.mlir").read_text(),
        folder / "executables",
        json.loads((folder / "statistics.json").read_text())["stream-aggregate"],
        made.report,
    )


@pytest.fixture(scope="module")
def dump(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Dumped]:
    """dump(activations, context), compiled once each."""

    @functools.cache
    def compile_once(activations: str, context: int) -> Dumped:
        folder = tmp_path_factory.mktemp("dumped")
        return compile_with_dumps(checkpoints, folder, activations=activations, max_context=context)

    return compile_once


@pytest.fixture(scope="module", params=["int8", "none"])
def dumped(request: pytest.FixtureRequest, dump: Callable[..., Dumped]) -> Dumped:
    return dump(request.param, 64)


def mode(dumped: Dumped) -> tuple[str, str]:
    """What the kernels of the mode are called, and those of the other."""
    int8, planes = "int8", "planes"
    return (int8, planes) if dumped.report["options"]["activations"] == "int8" else (planes, int8)


def test_no_weight_is_in_the_program(dumped: Dumped) -> None:
    """Cases 82 and 119: everything is a parameter; neither the text nor the program holds values of weights."""
    assert len(dumped.module) < 1_000_000
    assert "dense_resource" not in dumped.module
    literals = re.findall(r"dense<[^>]{1000,}>", dumped.module)
    assert literals == []
    assert dumped.statistics["global"]["variable-count"] == 0
    [program] = dumped.bundle.manifest.programs
    weights = 64 * 64 * 2 + 32 * 64 * 2 + 96 * 64 * 3
    assert (dumped.bundle.folder / program.file).stat().st_size < 400_000
    [archive] = dumped.bundle.manifest.parameters
    embedding = archive.tensors["model.embed_tokens.weight"].bytes
    assert archive.bytes < embedding + weights * 0.75 + 8192


def test_parameters_are_the_parts_of_the_packed_layers(dumped: Dumped) -> None:
    """Each once, however many entry points read it."""
    [archive] = dumped.bundle.manifest.parameters
    named = re.findall(r'#flow.parameter.named<"model"::"([^"]+)">', dumped.module)
    assert sorted(named) == sorted(archive.tensors)
    names = ("self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj")
    packed = {f"model.layers.0.{name}" for name in names}
    parts = {key.rpartition(".")[::2] for key in archive.tensors if key.rpartition(".")[0] in packed}
    assert parts == {(name, part) for name in packed for part in ("codes", "scale")}
    others = {key for key in archive.tensors if key.rpartition(".")[0] not in packed}
    assert {key for key in others if key.startswith("model.layers")} == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    }
    assert "lm_head.weight" not in archive.tensors  # tied: one parameter
    merged = {name: members for name, members in dumped.report["merged"].items()}
    assert {len(members) for members in merged.values()} == {2, 3}


def test_the_mode_asked_for_is_the_one_that_runs(dumped: Dumped) -> None:
    """Case 65."""
    wanted, other = mode(dumped)
    executables = set(re.findall(r"stream\.executable private @(\w+)", dumped.module))
    ours = {name for name in executables if name.startswith("halfbyte_")}
    linear = {name for name in ours if not re.search("append|attention|_rms_norm", name)}
    kinds = {re.sub(r"halfbyte_(gemm|quantize)_.*", r"\1", name) for name in linear}
    assert kinds == {"gemm", "quantize"}
    assert all(re.search(wanted, name) for name in linear)
    assert not any(re.search(other, name) for name in linear)
    built = " ".join(path.name for path in dumped.executables.iterdir())
    assert all(name in built for name in ours)
    assert len([name for name in ours if "rotate" in name]) == 1
    assert sorted("one" in name for name in ours if "attention" in name) == [False, True]
    for row in dumped.report["layers"]:
        if row["scheme"] != "float":
            assert re.search(wanted, row["kernel"]) and row["kernel"] in linear


def test_caches_are_plain_arguments(dumped: Dumped) -> None:
    assert "overwrite" not in dumped.module
    assert "!torch.tensor" not in dumped.module
    assert "util.global private mutable" not in dumped.module
    for name, caches in (("forward", 0), ("prefill", 2), ("decode", 2)):
        [signature] = re.findall(rf"func\.func @{name}\((.*?)\) ->", dumped.module)
        assert signature.count("!torch.vtensor<[2,1,") == caches
        assert len(dumped.bundle.entry_points[name].inputs) == (1 if name == "forward" else 2 + caches)
    decode = dumped.bundle.entry_points["decode"]
    assert [str(tensor) for tensor in decode.inputs] == [
        "tokens: 1xi64",
        "position: 1xi64",
        "k0: 2x1x16x64xf32",
        "v0: 2x1x1024xf32",
    ]
    assert [str(tensor) for tensor in decode.outputs] == ["logits: 512xf32"]
    assert [str(tensor) for tensor in dumped.bundle.entry_points["forward"].outputs] == ["logits: Tx512xf32"]
    assert str(dumped.bundle.entry_points["prefill"].inputs[0]) == "tokens: Txi64"


def test_nothing_of_four_bits_passes_a_border(dumped: Dumped) -> None:
    """Case 113."""
    assert not re.search(r"[x<,]i4\b", dumped.module)


def test_the_kernels_use_the_instructions_they_are_for(dumped: Dumped) -> None:
    host = CpuTarget.named("host")
    if lacking := AVX512VNNI.needs - host.features:
        pytest.skip(f"this CPU lacks {', '.join(sorted(lacking))}")
    assembly = "".join(path.read_text() for path in dumped.executables.glob("*.s"))
    code = "".join(path.read_text() for path in dumped.executables.glob("*codegen.ll"))
    assert assembly.count("vpdpbusd") + code.count("vpdpbusd.512") > 8
    assert all(host.isa.name in row["kernel"] for row in dumped.report["layers"] if row["scheme"] != "float")


def test_what_a_call_needs_does_not_grow_with_the_caches(dump: Callable[..., Dumped]) -> None:
    """The caches are written in place and read where they are."""
    short, long = (dump("none", context).statistics["execution"] for context in (64, 256))
    for key in ("copy-count", "dispatch-count", "fill-count"):
        assert short[key] == long[key]
    assert short["transient-memory-size"] == long["transient-memory-size"]
