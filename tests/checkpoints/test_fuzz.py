"""Whatever is done to a header, only errors meant for a user come out, fast and without much memory."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.checkpoints import open_checkpoint
from halfbyte.errors import CheckpointError, UnsupportedLayerError

BOUNDED = settings(
    max_examples=120,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=9), st.booleans()), min_size=1, max_size=4
)

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def damaged(blob: bytes, header: int, edits: list[tuple[float, bytes, bool]], cut: float) -> bytes:
    """Bytes written over the header or put into it, and perhaps the end cut off."""
    for place, new, over in edits:
        at = int(place * header)
        blob = blob[:at] + new + blob[at + (len(new) if over else 0) :]
    return blob[: int(len(blob) * cut)] if cut < 0.5 else blob


def read_everything(path: Path) -> None:
    with contextlib.suppress(CheckpointError, UnsupportedLayerError):
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.layers.items():
            if info.scheme is not None:
                checkpoint.quantized(name)
                checkpoint.permutation(name)
        for name in checkpoint.floats:
            checkpoint.float_tensor(name)


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "quantize_config.json", "model.safetensors"):
        shutil.copy(data / "base-gptq" / name, tmp_path)
    return tmp_path


@BOUNDED
@given(edits=EDITS, cut=st.floats(0, 1))
def test_safetensors_headers(
    data: Path, folder: Path, edits: list[tuple[float, bytes, bool]], cut: float
) -> None:
    blob = (data / "base-gptq" / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(blob[:8], "little")
    (folder / "model.safetensors").write_bytes(damaged(blob, header, edits, cut))
    read_everything(folder)


@BOUNDED
@given(name=st.sampled_from(["config.json", "quantize_config.json"]), edits=EDITS, cut=st.floats(0, 1))
def test_configurations(
    data: Path, folder: Path, name: str, edits: list[tuple[float, bytes, bool]], cut: float
) -> None:
    for whole in ("config.json", "quantize_config.json"):
        shutil.copy(data / "base-gptq" / whole, folder)
    blob = (folder / name).read_bytes()
    (folder / name).write_bytes(damaged(blob, len(blob), edits, cut))
    read_everything(folder)


@BOUNDED
@given(
    key=st.sampled_from(
        ["bits", "group_size", "sym", "desc_act", "checkpoint_format", "dynamic", "quant_method"]
    ),
    value=ANYTHING,
)
def test_values_of_configurations(data: Path, folder: Path, key: str, value: object) -> None:
    config = json.loads((data / "base-gptq" / "config.json").read_text())
    config["quantization_config"][key] = value
    (folder / "quantize_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    read_everything(folder)


CT = "base-ct-w4a8"
CT_KEYS = (
    *("format", "config_groups", "ignore", "sparsity_config", "transform_config", "kv_cache_scheme"),
    *("targets", "weights", "input_activations", "num_bits", "type", "strategy", "group_size"),
    *("block_structure", "symmetric", "dynamic", "actorder"),
)


@BOUNDED
@given(edits=EDITS, cut=st.floats(0, 1), fp8=st.booleans())
def test_headers_of_compressed_tensors(
    data: Path, tmp_path: Path, edits: list[tuple[float, bytes, bool]], cut: float, fp8: bool
) -> None:
    source = data / ("qwen3-ct-fp8-dynamic" if fp8 else CT)
    shutil.copy(source / "config.json", tmp_path)
    blob = (source / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(blob[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(damaged(blob, header, edits, cut))
    read_everything(tmp_path)


@BOUNDED
@given(
    place=st.sampled_from(["", "group", "weights", "input_activations"]),
    key=st.sampled_from(CT_KEYS),
    value=ANYTHING | st.sampled_from(["group", "channel", "tensor", "block", "token", [64, 64], 8, "float"]),
)
def test_values_of_compressed_tensors(
    data: Path, tmp_path: Path, place: str, key: str, value: object
) -> None:
    config = json.loads((data / CT / "config.json").read_text())
    quantization = config["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    {"": quantization, "group": group}.get(place, group.get(place))[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(data / CT / "model.safetensors", tmp_path)
    read_everything(tmp_path)


@BOUNDED
@given(
    method=st.sampled_from(["fp8", "w4afp8"]),
    key=st.sampled_from(
        ["fmt", "activation_scheme", "weight_block_size", "group_size", "modules_to_not_convert", "scale_fmt"]
    ),
    value=ANYTHING,
)
def test_values_of_fp8(data: Path, tmp_path: Path, method: str, key: str, value: object) -> None:
    config = json.loads((data / "llama-ct-fp8-block" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "weight_block_size": [128, 128], key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(data / "llama-ct-fp8-block" / "model.safetensors", tmp_path)
    read_everything(tmp_path)


@BOUNDED
@given(edits=EDITS, cut=st.floats(0, 1))
def test_gguf_headers(data: Path, tmp_path: Path, edits: list[tuple[float, bytes, bool]], cut: float) -> None:
    blob = (data / "llama-gguf-q4_1" / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(damaged(blob, 12992, edits, cut))
    read_everything(tmp_path / "model.gguf")
