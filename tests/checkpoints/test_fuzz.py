"""Whatever is done to a header, only errors meant for a user come out, fast and without much memory."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_gguf import float_values, metadata, shapes, write_gguf

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


AWQ, AUTO_ROUND = "qwen2-awq-asym-g32", "llama-autoround-zeros-as-stored"
HEADERS = (
    *(AWQ, AUTO_ROUND, "llama-torchao-int4-asym-g32", "llama-torchao-classes", "llama-hqq-int4-g32"),
    *("llama-ct-nvfp4", "llama-ct-mxfp4"),
)
WORDS_KEYS = (
    *(
        "bits",
        "w_bit",
        "group_size",
        "q_group_size",
        "zero_point",
        "sym",
        "version",
        "backend",
        "quant_method",
    ),
    *("modules_to_not_convert", "packing_format", "data_type", "act_bits", "extra_config"),
    *("block_name_to_quantize", "to_quant_block_names", "modules_in_block_to_quantize", "dynamic"),
)
WORDS_VALUES = (
    *("gemm", "gemv", "awq", "gptq", "inc", "auto_round", "auto_round:auto_awq", "auto_round:auto_gptq"),
    *("auto_round:fp8", "auto_round:llm_compressor", "model.layers", 4, 8, 32, 64, -1),
    *({".*": {"bits": 16}}, {"mlp": {"bits": 8}}, {"(": {}}, {"-:.*": {}}, [["mlp.up_proj"]]),
)


@BOUNDED
@given(edits=EDITS, cut=st.floats(0, 1), name=st.sampled_from(HEADERS))
def test_headers_of_packed_words(
    data: Path, tmp_path: Path, edits: list[tuple[float, bytes, bool]], cut: float, name: str
) -> None:
    shutil.copy(data / name / "config.json", tmp_path)
    blob = (data / name / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(blob[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(damaged(blob, header, edits, cut))
    read_everything(tmp_path)


@BOUNDED
@given(
    name=st.sampled_from([AWQ, AUTO_ROUND]),
    changes=st.dictionaries(
        st.sampled_from(WORDS_KEYS), ANYTHING | st.sampled_from(WORDS_VALUES), min_size=1, max_size=3
    ),
)
def test_values_of_packed_words(data: Path, tmp_path: Path, name: str, changes: dict[str, object]) -> None:
    config = json.loads((data / name / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(data / name / "model.safetensors", tmp_path)
    read_everything(tmp_path)


@BOUNDED
@given(
    kinds=st.lists(st.sampled_from([*GGMLQuantizationType]), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_gguf_blocks_of_random_bytes(tmp_path: Path, kinds: list[GGMLQuantizationType], seed: int) -> None:
    """Every type there is, with any bits, NaN scales too: a weight or an error, and never another type's bytes."""
    random = np.random.default_rng(seed)
    values = float_values(sizes=shapes(256, 256, 64))
    names = [name for name, value in values.items() if value.ndim == 2]
    types = {}
    for kind in kinds:
        name = names[int(random.integers(len(names)))]
        block, octets = GGML_QUANT_SIZES[kind]
        size = values[name].shape[1] // block * octets
        types[name] = (kind, random.integers(0, 256, (len(values[name]), size), np.uint8))
    keys = metadata("llama", embedding_length=256, feed_forward_length=256)
    write_gguf(tmp_path / "model.gguf", "llama", keys, values, types)
    read_everything(tmp_path / "model.gguf")


@BOUNDED
@given(edits=EDITS, cut=st.floats(0, 1))
def test_gguf_headers(data: Path, tmp_path: Path, edits: list[tuple[float, bytes, bool]], cut: float) -> None:
    blob = (data / "llama-gguf-q4_1" / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(damaged(blob, 12992, edits, cut))
    read_everything(tmp_path / "model.gguf")
