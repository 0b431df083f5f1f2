"""halfbyte verify: right bundles pass, bundles that were tampered with do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import iree.runtime as rt
import pytest
from slow import slow

from halfbyte import check_layers
from halfbyte.check_layers import FP8_LIMIT
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.progress import Progress
from halfbyte.verify_model import Limits, verify

Compile = Callable[..., Path]
Main = Callable[..., int]
# Compiled for the CPU that test_logits.py takes.
MIXTRAL = "mixtral-ct-w4a16-sharded"
V2, ACT_ORDER, Q4_1 = "llama-gptq-v2-asym-g32", "qwen2-gptq-v1-actorder-g32", "llama-gguf-q4_1"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (ACT_ORDER, {}),
        (Q4_1, {"activations": "int8"}),
        (V2, {"activations": "int8", "min_tokens": 5}),
        ("base-gptq", {"dtype": "f16"}),
    ],
)
def test_every_layer_has_the_bits_of_its_reference(
    checkpoints: Path, compiled: Compile, name: str, options: dict[str, object]
) -> None:
    found = verify(compiled(name, **options), checkpoints / name, tokens=[3, 99, 500 % 32, 7, 7, 21])
    assert found.failures == ()
    assert all(check.equal and check.error == 0 and check.rows == 6 for check in found.layers)
    archive = json.loads((compiled(name, **options) / "manifest.json").read_text())["parameters"][0]
    assert len(found.layers) == sum(key.endswith(".codes") for key in archive["tensors"])
    limit = 1e-2 if options else 3e-6
    assert max(check.float_error for check in found.layers) < (0.1 if "activations" in options else limit)
    assert found.step_error <= (0 if not options else 3e-2)
    assert found.tokens == 6


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        ("base-ct-w4a8", (0.01, 0.15)),
        ("llama-ct-w4afp8", (0.01, 0.15)),
        ("llama-ct-static-int8", (0.005, 0.3)),
    ],
)
def test_activations_of_the_checkpoint_have_the_bits_of_the_reference(
    checkpoints: Path, compiled: Compile, name: str, errors: tuple[float, float]
) -> None:
    """With static scales, inputs beyond what the calibration saw are cut off."""
    found = verify(compiled(name), checkpoints / name, tokens=[3, 99, 20, 7, 7, 21])
    assert found.failures == ()
    assert all(check.equal and check.error == 0 for check in found.layers)
    assert all(errors[0] < check.float_error < errors[1] for check in found.layers)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-ct-fp8-block", {}),
        ("qwen3-ct-fp8-dynamic", {}),
        ("qwen3-ct-fp8-dynamic", {"activations": "none"}),
    ],
)
def test_e4m3_layers_are_near_their_reference(
    checkpoints: Path, compiled: Compile, name: str, options: dict[str, object]
) -> None:
    """q, k and v are merged, with blocks of their own each."""
    found = verify(compiled(name, **options), checkpoints / name, tokens=[3, 99, 20, 7, 7, 21])
    assert found.failures == ()
    assert {check.name.rpartition(".")[2] for check in found.layers} == {
        "q_proj+k_proj+v_proj",
        "o_proj",
        "gate_proj+up_proj",
        "down_proj",
    }
    assert all(check.error < 2e-6 and check.limit == FP8_LIMIT for check in found.layers)
    assert all((check.float_error < 2e-6) == bool(options) for check in found.layers)
    strict = verify(compiled(name, **options), checkpoints / name, tokens=[1, 2, 3], limits=Limits(layer=0.0))
    assert len(strict.failures) == sum(not check.equal for check in strict.layers)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (MIXTRAL, {}),
        ("qwen3moe-ct-w4a8", {}),
        ("qwen3moe-autoround-g32", {"dtype": "bf16"}),
        ("deepseek-w4afp8", {}),
    ],
)
def test_the_experts_of_a_block_have_the_bits_of_their_reference(
    checkpoints: Path, compiled: Compile, portable: str, name: str, options: dict[str, object]
) -> None:
    bundle = compiled(name, cpu=portable if name == MIXTRAL else "host", **options)
    limits = Limits(kl=9.0)  # a token that another expert takes is another token
    found = verify(bundle, checkpoints / name, tokens=[3, 99, 20, 7, 7, 21], limits=limits)
    assert found.failures == ()
    experts = json.loads((bundle / "report.json").read_text())["experts"]
    checks = {check.name: check for check in found.layers if check.name in experts}
    assert len(checks) == len(experts) > 0
    assert all(check.equal and check.rows == 6 for check in checks.values())
    least, most = {MIXTRAL: (0, 3e-6), "qwen3moe-autoround-g32": (1e-4, 2e-2)}.get(name, (0.003, 0.2))
    assert all(least < check.float_error < most for check in checks.values())


@pytest.mark.parametrize("side", ["up", "down"])
def test_one_wrong_weight_of_an_expert_fails_its_block(
    checkpoints: Path, compiled: Compile, portable: str, tmp_path: Path, side: str
) -> None:
    block = "model.layers.0.mlp.experts"
    shutil.copytree(compiled(MIXTRAL, cpu=portable), tmp_path / "tampered")
    flip_a_nibble(tmp_path / "tampered", f"{block}.{side}")
    found = verify(tmp_path / "tampered", checkpoints / MIXTRAL, tokens=[*range(3, 40)])
    failed = [failure.split(":")[0] for failure in found.failures]
    assert [name for name in failed if name.startswith("model.")] == [block]


def test_one_wrong_e4m3_weight_fails_its_layer(checkpoints: Path, compiled: Compile, tmp_path: Path) -> None:
    name, layer = "llama-ct-fp8-block", "model.layers.0.mlp.down_proj"
    shutil.copytree(compiled(name), tmp_path / "tampered")
    flip_a_nibble(tmp_path / "tampered", layer, by=0x80)
    found = verify(tmp_path / "tampered", checkpoints / name, tokens=[3, 99, 20, 7])
    assert [failure.split(":")[0] for failure in found.failures] == [layer]


def flip_a_nibble(bundle: Path, layer: str, by: int = 8) -> None:
    """Changes one weight of a layer: column 0, input 0."""
    path = bundle / "model.n64k8.irpa"
    index = rt.ParameterIndex()
    index.load(str(path), mmap=False)
    [place] = [entry.file_storage[1] for key, entry in index.items() if key == f"{layer}.codes"]
    del index
    content = bytearray(path.read_bytes())
    content[place] ^= by
    path.write_bytes(content)


@pytest.fixture
def tampered(compiled: Compile, tmp_path: Path) -> Path:
    folder = tmp_path / "tampered"
    shutil.copytree(compiled(V2), folder)
    flip_a_nibble(folder, "model.layers.1.mlp.down_proj")
    return folder


def test_one_wrong_weight_fails_its_layer(
    checkpoints: Path, tampered: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("verify", tampered, checkpoints / V2, "--tokens", "176,5,271,9") == 1
    captured = capsys.readouterr()
    assert f"\nerror: {tampered}: " in captured.err
    assert "model.layers.1.mlp.down_proj: error" in captured.err
    assert "model.layers.0" not in captured.err
    assert "layers: 7 of 8 equal the reference bit for bit" in captured.out
    assert main("verify", tampered, checkpoints / V2, "--tokens", "176,5", "--json", "--max-layer-error", "9",
                "--max-logits-error", "9", "--max-kl", "9") == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    wrong = [check["name"] for check in found["layers"] if not check["equal"]]
    assert wrong == ["model.layers.1.mlp.down_proj"]
    assert found["failures"] == []


def test_passes_on_the_command_line(
    checkpoints: Path, compiled: Compile, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("verify", compiled(V2), checkpoints / V2) == 0
    assert "layers: 8 of 8 equal the reference bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [pytest.param("f16", marks=slow), "bf16"])
def test_caches_of_16_bits_have_the_limits_of_16_bits(
    checkpoints: Path, compiled: Compile, kind: Literal["f16", "bf16"]
) -> None:
    bundle = compiled(V2, kv_cache=kind)
    found = verify(bundle, checkpoints / V2, tokens=[1, 2, 3, 4, 5])
    assert found.failures == () and all(check.equal for check in found.layers)
    assert found.logits_error > 1e-6, "the caches are rounded"
    wide = verify(bundle, checkpoints / V2, tokens=[1, 2, 3, 4, 5], limits=Limits(logits=1e-6))
    assert any(failure.startswith("logits") for failure in wide.failures)


@pytest.mark.parametrize("name", [V2, ACT_ORDER, "llama-ct-fp8-block"])
def test_layers_are_compared_a_few_outputs_at_a_time(
    checkpoints: Path, compiled: Compile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The references of a large layer would not fit the memory; with biases, permutations and blocks of outputs."""
    whole = verify(compiled(name), checkpoints / name, tokens=[3, 99, 20, 7])
    monkeypatch.setattr(check_layers, "_ROWS", 24)
    seen = Seen()
    found = verify(compiled(name), checkpoints / name, tokens=[3, 99, 20, 7], progress=seen)
    assert whole.failures == () and [replace(check, float_error=0.0) for check in found.layers] == [
        replace(check, float_error=0.0) for check in whole.layers
    ]
    assert [check.float_error for check in found.layers] == pytest.approx(
        [check.float_error for check in whole.layers], rel=1e-6
    )
    total = len(found.layers)
    every = [(number + 1, total) for number in range(total)]
    assert seen.phases == {"float model": every, "layers": every, "logits": []}


class Seen(Progress):
    def __init__(self) -> None:
        self.phases: dict[str, list[tuple[int, int]]] = {}

    def phase(self, name: str) -> None:
        self.phases[name] = []

    def advance(self, done: int, total: int) -> None:
        [*_, last] = self.phases.values()
        last.append((done, total))


def test_limits_are_kept(checkpoints: Path, compiled: Compile) -> None:
    found = verify(compiled(V2), checkpoints / V2, tokens=[1, 2, 3], limits=Limits(logits=1e-12, kl=-1.0))
    assert [failure.split(":")[0] for failure in found.failures] == [
        "logits",
        "logits",
        "prefill and decode",
    ][: len(found.failures)]
    assert len(found.failures) >= 2


def test_another_checkpoint_is_refused(checkpoints: Path, compiled: Compile) -> None:
    with pytest.raises(CheckpointError, match="the bundle holds a layer that the checkpoint does not"):
        verify(compiled(V2), checkpoints / "base-gptq", tokens=[1, 2])
    with pytest.raises(UsageError, match="at least two tokens"):
        verify(compiled(V2), checkpoints / V2, tokens=[1])
