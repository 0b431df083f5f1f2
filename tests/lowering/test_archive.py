"""Parameter archives as IREE reads them; the packed layout, taken apart by another hand."""

from __future__ import annotations

import hashlib
from pathlib import Path

import iree.runtime as rt
import numpy as np
import pytest
import torch
from numpy_twin import Array
from random_layers import KINDS, random_weight
from torch_bridge import quant_tensor, tensor

from halfbyte.errors import CompilerError, UnsupportedLayerError
from halfbyte.lowering.archive import write_archive
from halfbyte.lowering.kernels.isa import PLAIN
from halfbyte.lowering.kernels.linear import Linear
from halfbyte.lowering.layout import Packing, pack_bias, pack_codes, pack_groups
from halfbyte.lowering.parameters import ParameterGroup, Parameters, TensorSpec
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.lowering.tensor_pieces import pieces
from halfbyte.passes.merge_linears import join_weights
from halfbyte.passes.program import LayerSource
from halfbyte.passes.scheme import Activations, Zero
from halfbyte.passes.weight import QuantTensor
from halfbyte.passes.words import CodeWords


def parameters(**tensors: Array) -> Parameters:
    kinds = {"f4": "f32", "i8": "i64", "u1": "i8", "f2": "f16"}
    out = Parameters()
    for name, value in tensors.items():
        spec = TensorSpec(name, value.shape, kinds[value.dtype.str[1:]])
        out.add(name, ParameterGroup((spec,), lambda name=name, value=value: {name: value}))  # type: ignore[misc]
    return out


def read(path: Path) -> dict[str, bytes]:
    """All tensors by IREE's own reader."""
    index = rt.ParameterIndex()
    index.load(str(path), format="irpa", mmap=False)
    content = path.read_bytes()
    out = {}
    for key, entry in index.items():
        assert key not in out
        _, offset = entry.file_storage
        assert offset % 64 == 0
        out[key] = content[offset : offset + entry.length]
    return out


def test_iree_reads_what_is_written(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {
        "a.weight": random.normal(size=(3, 5)).astype(np.float32),
        "b": random.integers(0, 256, 1).astype(np.uint8),
        "c": np.array([1, -2], np.int64),
        "größe/λ": random.normal(size=(7,)).astype(np.float16),
        "d": np.ones((64,), np.uint8),
        "e": np.ones((65,), np.uint8),
    }
    path = tmp_path / "a.irpa"
    digest = write_archive(path, parameters(**tensors))
    assert read(path) == {name: value.tobytes() for name, value in tensors.items()}
    assert list(read(path)) == list(tensors)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_size < sum(value.nbytes for value in tensors.values()) + 1024


def test_an_empty_archive_and_an_empty_tensor(tmp_path: Path) -> None:
    write_archive(tmp_path / "none.irpa", Parameters())
    assert read(tmp_path / "none.irpa") == {}
    write_archive(
        tmp_path / "one.irpa", parameters(a=np.ones(3, np.float32), nothing=np.zeros((0, 4), np.float32))
    )
    assert read(tmp_path / "one.irpa") == {"a": np.ones(3, np.float32).tobytes(), "nothing": b""}


def test_names_must_be_there_and_differ(tmp_path: Path) -> None:
    """Case 79."""
    spec = TensorSpec("same", (1,), "f32")
    twice = Parameters()
    for group in ("one", "two"):
        twice.add(group, ParameterGroup((spec,), lambda: {"same": np.zeros(1, np.float32)}))
    with pytest.raises(CompilerError, match="'same': every tensor of an archive needs a name of its own"):
        write_archive(tmp_path / "a.irpa", twice)
    nameless = Parameters()
    nameless.add("x", ParameterGroup((TensorSpec("", (1,), "f32"),), lambda: {"": np.zeros(1, np.float32)}))
    with pytest.raises(CompilerError, match="'': every tensor"):
        write_archive(tmp_path / "a.irpa", nameless)
    assert list(tmp_path.iterdir()) == []


def test_sizes_must_be_those_declared(tmp_path: Path) -> None:
    wrong = Parameters()
    wrong.add("w", ParameterGroup((TensorSpec("w", (3,), "f32"),), lambda: {"w": np.zeros(4, np.float32)}))
    with pytest.raises(CompilerError) as error:
        write_archive(tmp_path / "a.irpa", wrong)
    assert str(error.value).splitlines() == [
        "w: a tensor has another size than declared",
        "  found: 16 bytes",
        "  accepted: 12 bytes for tensor<3xf32>",
    ]


def test_groups_are_made_in_turn(tmp_path: Path) -> None:
    """Every tensor is made once, when the group before it is made; progress counts bytes."""
    made: list[str] = []
    seen: list[tuple[int, int]] = []
    many = Parameters()
    for name in "abc":

        def make(name: str = name) -> dict[str, Array]:
            made.append(f"{name} after {len(seen)}")
            return {name: np.zeros(10, np.float32)}

        many.add(name, ParameterGroup((TensorSpec(name, (10,), "f32"),), make))
    write_archive(tmp_path / "a.irpa", many, lambda done, total: seen.append((done, total)))
    assert made == ["a after 0", "b after 1", "c after 2"]
    assert seen == [(40, 120), (80, 120), (120, 120)]


# ---------------------------------------------------------------- the packed layout


def unpacked(packed: Array, outputs: int, inputs: int) -> Array:
    """[N, K] codes from [N/64][K/8][4][64] bytes, one by one from the description of the layout."""
    codes = np.zeros((packed.shape[0] * 64, packed.shape[1] * 8), np.uint8)
    for n in range(codes.shape[0]):
        block, line, place = n // 64, n % 64 // 16, n % 16
        for k in range(codes.shape[1]):
            octet = packed[block, k // 8, line, 4 * place + k % 4]
            codes[n, k] = octet & 15 if k % 8 < 4 else octet >> 4
    assert not codes[outputs:].any() and not codes[:, inputs:].any()
    return codes[:outputs, :inputs]


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 8), (8, 16), (65, 24), (20, 35), (130, 40), (1, 1)])
def test_codes_come_back(outputs: int, inputs: int) -> None:
    weight = random_weight(outputs, outputs, inputs, inputs)
    packed = pack_codes(quant_tensor("w", weight))
    assert packed.dtype == np.uint8
    assert packed.shape == Packing(outputs, inputs, inputs).codes_shape
    np.testing.assert_array_equal(unpacked(packed, outputs, inputs), weight.codes)


def in_words(codes: Array, bits: int, columns_first: bool) -> CodeWords:
    """Codes as GPTQ's files (or, rows first, compressed-tensors') have them, with rubbish in the fields behind K."""
    per_word = 32 // bits
    count = -(-codes.shape[1] // per_word)
    fields = np.random.default_rng(1).integers(0, 1 << bits, (len(codes), count * per_word), dtype=np.uint64)
    fields[:, : codes.shape[1]] = codes
    shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    words = (fields.reshape(len(codes), count, per_word) << shifts).sum(-1).astype(np.uint32).view(np.int32)
    stored = torch.from_numpy(np.ascontiguousarray(words.T)).t() if columns_first else torch.from_numpy(words)
    return CodeWords(stored, codes.shape[1], bits)


@pytest.mark.parametrize("columns_first", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 8), (65, 24), (20, 35), (200, 44), (1, 1), (64, 4)])
def test_words_are_packed_like_their_codes(outputs: int, inputs: int, bits: int, columns_first: bool) -> None:
    codes = np.random.default_rng(outputs).integers(0, 1 << bits, (outputs, inputs), dtype=np.uint8)
    scale = torch.ones(outputs, 1)
    loose = QuantTensor("w", torch.from_numpy(codes), scale, inputs, bits=bits)
    words = QuantTensor("w", in_words(codes, bits, columns_first), scale, inputs, bits=bits)
    np.testing.assert_array_equal(words.codes.numpy(), codes)
    assert words.shape == (outputs, inputs) and words.scheme == loose.scheme
    np.testing.assert_array_equal(pack_codes(words), pack_codes(loose))
    if bits == 4:
        np.testing.assert_array_equal(unpacked(pack_codes(words), outputs, inputs), codes)


@pytest.mark.parametrize("forms", ["ww", "wb", "bw", "wwb", "bww"])
@pytest.mark.parametrize("columns_first", [True, False])
def test_layers_join_in_either_form(forms: str, columns_first: bool) -> None:
    """Words (w) and bytes (b) of one scheme, as mixed checkpoints have them."""
    parts = [
        np.random.default_rng(i).integers(0, 16, (10 + i, 40), dtype=np.uint8) for i in range(len(forms))
    ]
    weights = [
        QuantTensor(
            f"w{i}",
            in_words(codes, 4, columns_first) if form == "w" else torch.from_numpy(codes),
            torch.full((len(codes), 5), float(i)),
            8,
        )
        for i, (form, codes) in enumerate(zip(forms, parts, strict=True))
    ]
    whole = np.concatenate(parts)
    joined = join_weights("w", iter(weights), len(whole))
    assert isinstance(joined, QuantTensor)
    np.testing.assert_array_equal(joined.codes.numpy(), whole)
    np.testing.assert_array_equal(
        joined.scale[:, 0], np.repeat(np.arange(len(forms)), [len(p) for p in parts])
    )
    assert isinstance(joined.stored, CodeWords) == ("b" not in forms)
    np.testing.assert_array_equal(unpacked(pack_codes(joined), *whole.shape), whole)


@pytest.mark.parametrize("scale", ["f32", "f16", "bf16"])
def test_scales_and_biases_come_back(scale: str) -> None:
    weight = random_weight(3, 70, 96, 32, "integer", scale, bias=True)
    value, bias, zero = tensor(weight.scale), tensor(weight.bias), tensor(weight.zero)
    assert value is not None and bias is not None and zero is not None
    for given, packed in ((weight.scale, pack_groups(value)), (weight.zero, pack_groups(zero))):
        back = packed.transpose(0, 2, 1).reshape(128, 3)
        np.testing.assert_array_equal(back[:70].view(given.dtype), given)
        assert not back[70:].any()
    np.testing.assert_array_equal(pack_bias(bias)[:70], weight.bias)
    assert not pack_bias(bias)[70:].any() and len(pack_bias(bias)) == 128


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (1, 40), (0, 3), (9, 2, 2)])
@pytest.mark.parametrize("most", [1, 24, 2**20])
def test_large_tensors_come_in_pieces(shape: tuple[int, ...], most: int) -> None:
    value = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).bfloat16()
    for kind, wide in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        found = pieces(value, TensorSpec("a", shape, kind), most)
        parts = [found] if isinstance(found, np.ndarray) else list(found)
        whole = b"".join(part.tobytes() for part in parts)
        assert whole == value.to(wide).reshape(-1).view(torch.uint8).numpy().tobytes()
        row = len(whole) // max(1, len(value) if shape else 1)
        assert all(part.nbytes <= max(most, row) for part in parts)
    with pytest.raises(CompilerError, match=r"declares(.|\n)*accepted: \[4, 4\]"):
        pieces(value, TensorSpec("a", (4, 4), "f32"), most)


def test_zeros_outside_of_the_codes_are_refused(tmp_path: Path) -> None:
    weight = random_weight(1, 64, 64, 32, "integer", "f16")
    source = quant_tensor("a.proj", weight)
    assert source.zero is not None
    source.zero[3, 1] = 17
    linear = Linear(PLAIN, Packing(64, 64, 32), "f32", "f16", Zero.INTEGER, False, Activations.INT8, 3, 0)
    layer = LayerSource(lambda: source, None, ("a.proj",))
    whole = Parameters()
    whole.add("a.proj", CpuTarget.named("x86-64").pack("a.proj", linear, layer))
    with pytest.raises(
        UnsupportedLayerError, match=r"a\.proj: a zero point(.|\n)*found: 17(.|\n)*accepted: 0 to 16"
    ):
        write_archive(tmp_path / "a.irpa", whole)
    source.zero[3, 1] = 16
    write_archive(tmp_path / "a.irpa", whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_layer_holds_four_bits_per_weight(kind: str, tmp_path: Path) -> None:
    """Case 7 and the like: 4 bits, and beside them the scales, zero points of a byte, minima and bias."""
    weight = random_weight(1, 256, 1024, 128, kind, "f16", bias=True)
    source = quant_tensor("layer", weight)
    bias = tensor(weight.bias)
    assert bias is not None
    linear = Linear(PLAIN, Packing(256, 1024, 128), "f32", "f16", Zero(kind), True, Activations.INT8, 3, 0)
    group = CpuTarget.named("x86-64").pack(
        "layer", linear, LayerSource(lambda: source, lambda: bias, ("layer",))
    )
    whole = Parameters()
    whole.add("layer", group)
    write_archive(tmp_path / "a.irpa", whole)
    found = {name: len(content) for name, content in read(tmp_path / "a.irpa").items()}
    groups = 256 * 8
    extra = {"symmetric": {}, "integer": {"layer.zero": groups}, "minimum": {"layer.minimum": 2 * groups}}[
        kind
    ]
    assert found == {"layer.codes": 256 * 512, "layer.scale": 2 * groups, "layer.bias": 4 * 256, **extra}
