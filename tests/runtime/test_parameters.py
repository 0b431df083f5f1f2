"""Parameter archives: residence in memory, and refusal of those that do not belong to the program."""

from __future__ import annotations

import json
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import iree.runtime
import numpy as np
import pytest

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.runtime import huge_pages, load
from halfbyte.runtime.huge_pages import HugePages
from halfbyte.runtime.manifest import Manifest, ParameterArchive, ParameterTensor
from halfbyte.runtime.parameters import load_archive


def _archive(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> ParameterArchive:
    index = iree.runtime.ParameterIndex()
    for key, tensor in tensors.items():
        index.add_buffer(key, tensor)
    index.create_archive_file(str(path))
    sizes = {key: ParameterTensor(tensor.nbytes) for key, tensor in tensors.items()}
    return ParameterArchive("model", path.name, "0" * 64, "n64k8", path.stat().st_size, ("cpu",), sizes)


def _content(index: iree.runtime.ParameterIndex) -> dict[str, bytes]:
    return {key: bytes(entry.file_view) for key, entry in index.items()}


def test_both_modes_hold_the_same_bytes(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    tensors = {
        f"t{i}": random.integers(0, 256, size, np.uint8) for i, size in enumerate((1, 63, 4097, 9 << 20))
    }
    tensors["nothing"] = np.zeros(0, np.uint8)
    archive = _archive(tmp_path / "a.irpa", tensors)
    mapped, held = load_archive(tmp_path, archive, "mmap"), load_archive(tmp_path, archive, "huge")
    wanted = {key: tensor.tobytes() for key, tensor in tensors.items()}
    assert _content(mapped.index) == wanted
    assert _content(held.index) == wanted
    assert mapped.residence.mode == "mmap" and mapped.residence.reason == ""
    if huge_pages.obstacle(archive.bytes) == "":
        assert held.residence.mode == "huge"
        assert held.residence.bytes == archive.bytes
        assert 0 <= held.residence.huge_bytes <= archive.bytes
        assert "MiB in memory" in str(held.residence)


def test_splats_stay_splats(tmp_path: Path) -> None:
    index = iree.runtime.ParameterIndex()
    index.add_splat("s", np.array([7], np.int32), 64)
    index.create_archive_file(str(tmp_path / "a.irpa"))
    size = (tmp_path / "a.irpa").stat().st_size
    archive = ParameterArchive("model", "a.irpa", "0" * 64, "x", size, ("cpu",), {"s": ParameterTensor(64)})
    for mode in ("huge", "mmap"):
        ((key, entry),) = load_archive(tmp_path, archive, mode).index.items()
        assert (key, entry.is_splat, entry.length) == ("s", True, 64)


@pytest.mark.skipif(bool(huge_pages.obstacle(64 << 20)), reason=huge_pages.obstacle(64 << 20))
def test_memory_is_zeroed_huge_and_where_the_mapping_was() -> None:
    mapping = mmap.mmap(-1, 5 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping[:3] = b"old"
    pages = HugePages(mapping)
    assert len(pages.array) == 5 << 20
    assert not pages.array.any()
    pages.array[:] = 1
    assert mapping[:3] == b"\1\1\1"
    assert pages.huge_bytes() in range(0, (6 << 20) + 1, 2 << 20)
    with pytest.raises(MemoryError):
        HugePages(memoryview(mapping)[1:])  # no page begins there


@pytest.mark.parametrize("mode", ["huge", "mmap"])
def test_the_memory_is_no_object_of_the_interpreter(tmp_path: Path, mode: str) -> None:
    """IREE's workers let go of it after a call has returned, without the interpreter's lock, and crash it then."""
    count = 2000
    archive = _archive(tmp_path / "a.irpa", {f"t{i}": np.full(64, 7, np.uint8) for i in range(count)})
    load_archive(tmp_path, archive, mode)
    before = sys.getallocatedblocks()
    loaded = load_archive(tmp_path, archive, mode)
    assert sys.getallocatedblocks() - before < count // 2
    assert len(loaded.index) == count


def test_maps_the_file_where_there_are_no_huge_pages(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(decoder_bundle).call("forward", np.array([1, 2]))[0]

    def bundle_without(reason: str) -> None:
        bundle = load(decoder_bundle, parameters="huge")
        (residence,) = bundle.residences
        assert residence.mode == "mmap" and residence.huge_bytes == 0
        assert reason in residence.reason and reason in bundle.describe()
        assert bundle.call("forward", np.array([1, 2]))[0].tobytes() == expected.tobytes()

    with monkeypatch.context() as patch:
        patch.setattr("halfbyte.runtime.huge_pages.sys.platform", "darwin")
        bundle_without("no transparent huge pages on this system")
    with monkeypatch.context() as patch:
        patch.setattr("halfbyte.runtime.huge_pages._available_memory", lambda: 1 << 20)
        bundle_without("too little memory")
    with monkeypatch.context() as patch:
        read = Path.read_text
        patch.setattr(
            Path,
            "read_text",
            lambda path, *a, **k: "always madvise [never]" if path.name == "enabled" else read(path, *a, **k),
        )
        bundle_without("switched off")


def _change(folder: Path, tensors: dict[str, int] | None = None, **fields: Any) -> None:
    """Rewrites what the manifest says about the archive."""
    manifest = Manifest.load(folder)
    archive = replace(manifest.parameters[0], **fields)
    if tensors is not None:
        archive = replace(archive, tensors={key: ParameterTensor(size) for key, size in tensors.items()})
    (folder / "manifest.json").write_text(json.dumps(replace(manifest, parameters=(archive,)).to_json()))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embedding": 176, "head": 180}, r"head: want 180 bytes, have 176"),
        ({"embedding": 176, "head": 176, "bias": 44}, r"bias: want 44 bytes, have no such tensor"),
        ({"embedding": 176}, r"head: not in the manifest, have 176 bytes"),
        ({"a": 1, "b": 2}, r"a: want 1 .*b: want 2 .*embedding: not in the manifest"),
    ],
)
@pytest.mark.parametrize("mode", ["huge", "mmap"])
def test_archive_of_another_model_is_refused_before_anything_runs(
    copied_bundle: Path, tensors: dict[str, int], message: str, mode: str
) -> None:
    """Case 80."""
    _change(copied_bundle, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(copied_bundle, parameters=mode)


def test_long_lists_of_differences_are_cut(copied_bundle: Path) -> None:
    _change(copied_bundle, {f"layer.{i}": 8 for i in range(30)})
    with pytest.raises(CheckpointError, match="and 24 more"):
        load(copied_bundle)


@pytest.mark.parametrize("size", [0, 10, 64, 100, 200, 300, 4032, 4095])
def test_truncated_archives_are_refused(copied_bundle: Path, size: int) -> None:
    path = copied_bundle / "model.n64k8.irpa"
    content = path.read_bytes()
    assert len(content) > size
    path.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=r"model.n64k8.irpa: (.|\n)*copy the bundle again"):
        load(copied_bundle)


def test_other_damage_is_refused(copied_bundle: Path) -> None:
    path = copied_bundle / "model.n64k8.irpa"
    content = path.read_bytes()
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="of another size"):
        load(copied_bundle)
    path.write_bytes(b"\0" * len(content))
    with pytest.raises(CheckpointError, match="unreadable parameter archive"):
        load(copied_bundle)
    path.unlink()
    with pytest.raises(CheckpointError, match="missing parameter archive"):
        load(copied_bundle)


@pytest.mark.parametrize("mode", ["huge", "mmap"])
def test_checksums_tell_archives_of_equal_sizes_apart(copied_bundle: Path, mode: str) -> None:
    """Such as scales in bf16 for scales in f16."""
    load(copied_bundle, parameters=mode, checksums=True)
    path = copied_bundle / "model.n64k8.irpa"
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(3).tobytes())] ^= 1  # somewhere in a tensor
    path.write_bytes(content)
    load(copied_bundle, parameters=mode)
    with pytest.raises(CheckpointError, match=r"not the one the manifest names(.|\n)*sha256"):
        load(copied_bundle, parameters=mode, checksums=True)


def test_unknown_mode(decoder_bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"'fast'(.|\n)*huge or mmap"):
        load(decoder_bundle, parameters="fast")
