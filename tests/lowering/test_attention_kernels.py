"""The attention kernels of every vector unit that this machine has, against plain arrays; caches start as NaN."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from attention_twin import Array, Rule, attention, rotated
from norm_twin import rms_norm
from numpy_twin import TYPES
from torch_bridge import tensor
from vulkan_device import no_device

import halfbyte
from halfbyte.lowering.kernels.attention import (
    AMX,
    AVX2,
    AVX512,
    NEON,
    PLAIN,
    UNITS,
    AttentionShape,
    VectorUnit,
    best_unit,
)
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.ops.attention_caches import key_cache_shape, value_cache_shape
from halfbyte.passes.ops.kv_append import KINDS
from halfbyte.passes.program import Program
from halfbyte.runtime import Bundle
from halfbyte.runtime.cpu_features import architecture, host_features

CONTEXT, EPS = 300, 1e-5
CPUS: dict[str, VectorUnit] = {
    "amx": AMX,
    "x86-64-v4": AVX512,
    "x86-64-v3": AVX2,
    "x86-64": PLAIN,
    "aarch64": NEON,
}
GPUS = ("vulkan", "cuda")


@dataclass(frozen=True)
class Case:
    """heads and key heads; widths of keys and values; turned pairs, 0 for none; merged: q, k, v are one tensor.

    norm: dtype of the weights of queries' and keys' norms; plus_one, rounds: how these are computed. latents: values
    are the first columns of keys, in one cache.
    """

    heads: int
    key_heads: int
    width: int
    value_width: int
    rule: Rule
    sinks: bool = False
    pairs: int = 0
    interleaved: bool = False
    io: str = "f32"
    cache: str = "f32"
    merged: bool = False
    norm: str = ""
    plus_one: bool = False
    rounds: bool = False
    latents: bool = False

    @property
    def caches(self) -> list[tuple[int, ...]]:
        """Their shapes."""
        if self.latents:
            return [value_cache_shape(self.key_heads, CONTEXT, self.width)]
        return [
            key_cache_shape(self.key_heads, CONTEXT, self.width),
            value_cache_shape(self.key_heads, CONTEXT, self.value_width),
        ]

    @property
    def norms(self) -> list[Array]:
        """The weights of both norms."""
        return [1.5 + 0.3 * normal(88 + i, self.width).astype(TYPES[self.norm]) for i in range(2)]


CASES = {
    "smol": Case(9, 3, 64, 64, Rule(0.125), pairs=32),
    "llama": Case(8, 2, 128, 128, Rule(0.0884), pairs=64),
    "wide": Case(2, 1, 256, 256, Rule(0.0625), pairs=128),
    "phi": Case(2, 2, 80, 80, Rule(0.1), pairs=20),
    "odd": Case(7, 1, 96, 96, Rule(0.1, window=100), pairs=48, interleaved=True),
    "latent": Case(2, 2, 192, 128, Rule(0.0722)),
    "sinks": Case(8, 1, 64, 64, Rule(0.125, window=70), sinks=True, pairs=32),
    "capped": Case(4, 2, 16, 24, Rule(0.25, softcap=3.0), pairs=4, interleaved=True),
    "chunked": Case(4, 2, 32, 32, Rule(0.2, chunk=50), pairs=16),
    "tiny": Case(2, 2, 4, 8, Rule(0.5, window=5), pairs=1),
    "strange": Case(13, 1, 18, 20, Rule(0.2), io="f32"),
    "beside": Case(9, 3, 64, 64, Rule(0.125), pairs=32, merged=True),
    "beside16": Case(4, 2, 48, 48, Rule(0.2), pairs=8, interleaved=True, io="bf16", cache="f16", merged=True),
    "normed": Case(9, 3, 64, 64, Rule(0.125), pairs=32, merged=True, norm="f32", plus_one=True),
    "normed16": Case(
        *(4, 2, 72, 72, Rule(0.2)),
        pairs=8,
        interleaved=True,
        io="bf16",
        merged=True,
        norm="bf16",
        rounds=True,
    ),
    "normed_half": Case(
        *(20, 1, 18, 18, Rule(0.2)), pairs=9, io="f16", cache="f16", merged=True, norm="f16", rounds=True
    ),
    "half": Case(6, 2, 32, 32, Rule(0.2), pairs=16, io="f16", cache="f16"),
    "brain": Case(4, 4, 32, 40, Rule(0.2), io="bf16"),
    "small": Case(9, 3, 64, 64, Rule(0.125), pairs=32, cache="bf16"),
    "large": Case(8, 2, 128, 128, Rule(0.0884), pairs=64, cache="bf16"),
    "uneven": Case(7, 1, 96, 80, Rule(0.1), sinks=True, io="bf16", cache="bf16"),
    "bent": Case(4, 2, 32, 48, Rule(0.3, softcap=2.0), pairs=8, io="f16", cache="bf16"),
    "latents": Case(20, 1, 576, 512, Rule(0.0722), latents=True),
    "latents16": Case(7, 1, 40, 24, Rule(0.2), io="bf16", cache="bf16", latents=True),
    "latents_near": Case(4, 2, 72, 40, Rule(0.2, window=30), sinks=True, io="f16", cache="f16", latents=True),
    "mixed": Case(3, 1, 10, 28, Rule(0.2, window=30), io="bf16", cache="f16"),
}
# What differs most between units; the best of this machine takes all.
TELLING = (
    "smol",
    "odd",
    "phi",
    "tiny",
    "capped",
    "beside",
    "beside16",
    "half",
    "small",
    "normed",
    "normed16",
    "normed_half",
    "latents",
    "latents16",
)
TILED = ("small", "large", "uneven", "bent")
ONE = (
    "smol",
    "llama",
    "odd",
    "sinks",
    "strange",
    "brain",
    "latents",
)  # with a kernel for single tokens, the others without


class Layer(torch.nn.Module):
    """Appends and attends, as a decoder's layer does."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for i, weight in enumerate(case.norms if case.norm else []):
            self.register_buffer(f"norm{i}", tensor(weight))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sinks: torch.Tensor,
        position: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        case, ops = self.case, torch.ops.halfbyte
        if case.latents:
            keys = ops.latent_append(k, keys, position)
        elif case.merged:
            qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)[None]
            turned = (cos, sin, case.interleaved, keys, values, position)
            norms = (self.norm0, self.norm1, EPS, case.plus_one, case.rounds) if case.norm else ()
            q, keys, values = ops.rotate_append_merged(qkv, case.heads, *turned, *norms)
        elif case.pairs:
            q, keys, values = ops.rotate_append(q, k, v, cos, sin, case.interleaved, keys, values, position)
        else:
            keys, values = ops.kv_append(k, v, keys, values, position)
        rule = (case.rule.scale, case.rule.window, case.rule.softcap, case.rule.chunk)
        given = sinks if case.sinks else None
        out: torch.Tensor = ops.attention(q, keys, values, position, given, case.value_width, *rule)
        # Sums of everything become one loop of IREE's, of which lavapipe runs 65536 rounds at most.
        return out.float() + 0 * (cos.sum(-1, keepdim=True) + sin.sum(-1, keepdim=True) + sinks.sum())


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(case: Case, tokens: int, position: int) -> list[Array]:
    """q, k, v, angles, sinks of some tokens; a token's are the same whatever comes with it."""
    shapes = (
        (case.heads, case.width),
        (case.key_heads, case.width),
        (case.key_heads, case.value_width),
        (case.pairs or 1,),
    )
    kind = TYPES[case.io]
    places = range(position, position + tokens)
    rows = [
        np.array([normal(1000 * i + place, *shape) for place in places], np.float32).reshape(tokens, *shape)
        for i, shape in enumerate(shapes)
    ]
    return [*(x.astype(kind) for x in rows[:3]), rows[3], normal(77, case.heads)]


@functools.cache
def export(case: Case, tokens: int | None) -> torch.export.ExportedProgram:
    """Once for all targets: compiling leaves it as it is."""
    q, k, v, angles, sinks = inputs(case, tokens or 5, 0)
    new = [torch.from_numpy(x.astype(np.float32)).to(KINDS[case.io]) for x in (q, k, v)]
    tables, rest = [torch.from_numpy(angles)] * 2, [torch.from_numpy(sinks), torch.tensor([0])]
    several = {0: torch.export.Dim("T", min=2, max=CONTEXT)} if tokens is None else None
    dynamic = (several,) * 5 + (None,) * (2 + len(case.caches))
    arguments = (
        *new,
        *(x.clone() for x in tables),
        *rest,
        *(torch.zeros(shape, dtype=KINDS[case.cache]) for shape in case.caches),
    )
    with torch.no_grad():
        return torch.export.export(Layer(case), arguments, dynamic_shapes=dynamic, strict=False)


def unit_of(features: Collection[str], tiles: bool) -> VectorUnit:
    """Of many tokens, over caches that tile registers take or do not."""
    return best_unit(features, AttentionShape(1, 64, 64, 1.0), "bf16" if tiles else "f32")


@pytest.fixture(scope="module", params=[*CPUS, *GPUS])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if request.param in GPUS:
        return gpu_bundle(tmp_path_factory.mktemp("attention") / request.param, request.param)
    target = CpuTarget.named(request.param)
    if target.architecture != architecture():
        pytest.skip(f"this is no {target.architecture}")
    if lacking := target.features - host_features():
        pytest.skip(f"this CPU lacks {', '.join(sorted(lacking))}")
    tiles = CPUS[request.param].tiles
    assert unit_of(target.features, tiles) is CPUS[request.param]
    best = unit_of(host_features(), tiles) is CPUS[request.param]
    chosen = TILED if tiles else CASES if best else TELLING
    entries = {f"{name}_some": export(CASES[name], None) for name in chosen}
    entries |= {f"{name}_one": export(CASES[name], 1) for name in chosen if name in ONE}
    out = tmp_path_factory.mktemp("attention") / request.param
    halfbyte.compile(Program(entries), out, halfbyte.CompileOptions(cpu=request.param))
    return halfbyte.load(out)


def gpu_bundle(out: Path, target: str) -> Bundle:
    if no_device(target):
        pytest.skip(no_device(target))
    entries = {f"{name}_some": export(case, None) for name, case in CASES.items()}
    entries |= {f"{name}_one": export(CASES[name], 1) for name in ONE}
    halfbyte.compile(Program(entries), out, halfbyte.CompileOptions(target=target))
    return halfbyte.load(out, device=target)


def carried(x: Array) -> Array:
    return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


class Caches:
    """The caches of one text on the device, as they are when nothing was fed: anything."""

    def __init__(self, bundle: Bundle, name: str) -> None:
        self.bundle, self.name, self.case, self.position = bundle, name, CASES[name], 0
        case = self.case
        blank = (np.full(shape, np.nan).astype(TYPES[case.cache]) for shape in case.caches)
        self.arrays = [bundle.to_device(carried(cache), case.cache) for cache in blank]

    def feed(self, tokens: int, *, spoilt: int | None = None) -> Array:
        """float32 [T, Hq, Dv]; the key and value of one token may be no numbers."""
        q, k, v, angles, sinks = inputs(self.case, tokens, self.position)
        if spoilt is not None:
            k[spoilt], v[spoilt] = np.nan, np.nan
        kind = "one" if tokens == 1 and self.name in ONE else "some"
        carriers = [carried(x) for x in (q, k, v)]
        rest = (np.cos(angles), np.sin(angles), sinks, np.array([self.position]))
        [out] = self.bundle.call(f"{self.name}_{kind}", *carriers, *rest, *self.arrays)
        self.position += tokens
        return out.reshape(tokens, self.case.heads, self.case.value_width)


def turned(case: Case, q: Array, k: Array, angles: Array) -> tuple[Array, Array]:
    """Queries and keys as they are multiplied: normed and rotated, where the case has that."""
    if case.norm:
        q, k = (
            rms_norm(x.reshape(-1, case.width), weight, EPS, case.plus_one, case.rounds).reshape(x.shape)
            for x, weight in zip((q, k), case.norms, strict=True)
        )
    if case.pairs:
        q, k = (rotated(x, angles, case.interleaved) for x in (q, k))
    return q, k


def expected(case: Case, tokens: int) -> Array:
    """Of the first tokens of a text."""
    q, k, v, angles, sinks = inputs(case, tokens, 0)
    q, k = turned(case, q, k, angles)
    k, v = (x.astype(np.float32).astype(TYPES[case.cache]) for x in (k, v))
    v = k[..., : case.value_width] if case.latents else v
    return attention(q, k, v, 0, case.rule, sinks if case.sinks else None)


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_single_tokens(bundle: Bundle, name: str) -> None:
    """Chunks that end within blocks, at their borders and behind them; a row's bits are its own."""
    if f"{name}_some" not in bundle.entry_points:
        pytest.skip("compared on the best unit of this machine")
    case, text = CASES[name], Caches(bundle, name)
    want, got = expected(case, 288), []
    for count in (5, 1, 57, 1, 1, 2, 130, 70, 1, 20):
        got.append(text.feed(count))
    y = np.concatenate(got)
    error = np.abs(y - want).max(axis=(1, 2)) / np.abs(want).max()
    # A key on the border of two values of 16 bits may be rounded to the other: its rotation is float32.
    limit = max({"f32": 4e-6, "f16": 1e-3, "bf16": 8e-3}[kind] for kind in (case.io, case.cache))
    assert (error <= limit).all(), f"tokens {np.flatnonzero(~(error <= limit))[:20]}: {error.max()}"
    if name in TILED and "amx" in str(bundle.folder):
        return  # then single tokens are computed otherwise
    other, at = Caches(bundle, name), 0
    for count in (1, 2, 40, 1, 100, 144):
        np.testing.assert_array_equal(other.feed(count), y[at : at + count])
        at += count
    assert at == 288


def test_tiles_of_chunks(bundle: Bundle) -> None:
    """With tile registers a token has the same bits in every chunk, and nearly those it has alone."""
    if "amx" not in str(bundle.folder):
        pytest.skip("no tile registers")
    for name in TILED:
        feeds = ((5, 59, 2, 128, 94), (40, 100, 148), (63, 2, 62, 161))
        texts = [
            np.concatenate([text.feed(n) for n in counts])
            for counts in feeds
            for text in [Caches(bundle, name)]
        ]
        for other in texts[1:]:
            np.testing.assert_array_equal(other, texts[0])
    alone = Caches(bundle, "small")
    single = np.concatenate([alone.feed(n) for n in (200, *[1] * 20)])
    together = Caches(bundle, "small").feed(220)
    np.testing.assert_array_equal(single[:200], together[:200])
    assert np.abs(single - together).max() <= 4e-5 * np.abs(together).max()


@pytest.mark.parametrize("name", ["small", "latents16"])
def test_no_token(bundle: Bundle, name: str) -> None:
    if f"{name}_some" not in bundle.entry_points:
        pytest.skip("compared on other units")
    text = Caches(bundle, name)
    assert text.feed(0).shape == (0, text.case.heads, text.case.value_width)
    blank = np.array(np.nan, TYPES["bf16"]).view(np.uint16)
    assert all((array.numpy() == blank).all() for array in text.arrays)


@pytest.mark.parametrize("name", ["smol", "odd", "phi", "small", "latents", "latents16"])
def test_a_token_that_is_no_number_touches_nothing_before_it(bundle: Bundle, name: str) -> None:
    if f"{name}_some" not in bundle.entry_points:
        pytest.skip("compared on other units")
    clean, spoilt = Caches(bundle, name).feed(90), Caches(bundle, name).feed(90, spoilt=67)
    np.testing.assert_array_equal(spoilt[:67], clean[:67])
    assert np.isnan(spoilt[67:]).all()


def test_what_does_not_fit_is_dropped(bundle: Bundle) -> None:
    """320 places: the last tokens find none, the first are computed, nothing outside of the caches is written."""
    if "tiny_some" not in bundle.entry_points:
        pytest.skip("compared on other units")
    text = Caches(bundle, "tiny")
    text.feed(299)
    got = text.feed(40)
    np.testing.assert_allclose(got[:21], expected(text.case, 320)[299:], atol=1e-5)


def test_every_unit_is_tested() -> None:
    assert set(CPUS.values()) == set(UNITS)
