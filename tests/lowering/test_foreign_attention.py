"""The attention kernels of a CPU that this machine is not, by an emulator: from empty caches, and from full ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_twin import Array
from foreign_cpu import ForeignBundle, obstacle, opened
from numpy_twin import TYPES
from test_attention_kernels import CASES, CONTEXT, ONE, Case, carried, expected, export, inputs, turned

import halfbyte
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.ops.attention_caches import key_cache, value_cache
from halfbyte.passes.program import Program
from halfbyte.runtime.cpu_features import architecture

NAMES = (
    "smol",
    "odd",
    "phi",
    "latent",
    "sinks",
    "tiny",
    "capped",
    "half",
    "brain",
    "small",
    "normed16",
    "latents",
)
PLACES = -(-CONTEXT // 64) * 64


@pytest.fixture(scope="module", params=["aarch64"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ForeignBundle:
    target = CpuTarget.named(request.param)
    if target.architecture == architecture():
        pytest.skip("test_attention_kernels.py has this machine's own")
    if why := obstacle(target):
        pytest.skip(why)
    entries = {f"{name}_some": export(CASES[name], None) for name in NAMES}
    entries |= {f"{name}_one": export(CASES[name], 1) for name in NAMES if name in ONE}
    out = tmp_path_factory.mktemp("attention") / request.param
    halfbyte.compile(Program(entries), out, halfbyte.CompileOptions(cpu=request.param))
    found = opened(out, target)
    assert isinstance(found, ForeignBundle)
    return found


def caches(case: Case, filled: int) -> list[Array]:
    """With the keys and values of the first tokens of a text, NaN behind them."""
    q, k, v, angles, _ = inputs(case, filled, 0)
    _, k = turned(case, q, k, angles)
    out = []
    for x, layout in [(k, value_cache)] if case.latents else [(k, key_cache), (v, value_cache)]:
        whole = np.full((x.shape[1], PLACES, x.shape[2]), np.nan, np.float32)
        whole[:, :filled] = x.astype(np.float32).swapaxes(0, 1)
        out.append(carried(layout(torch.from_numpy(whole)).numpy().astype(TYPES[case.cache])))
    return out


def feed(bundle: ForeignBundle, name: str, tokens: int, position: int, kind: str = "some") -> Array:
    """float32 [T, Hq, Dv] of tokens behind others."""
    case = CASES[name]
    q, k, v, angles, sinks = inputs(case, tokens, position)
    rest = (np.cos(angles), np.sin(angles), sinks, np.array([position]))
    carriers = [carried(x) for x in (q, k, v)]
    [out] = bundle.call(f"{name}_{kind}", *carriers, *rest, *caches(case, position))
    return out.reshape(tokens, case.heads, case.value_width)


@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_arrays(bundle: ForeignBundle, name: str) -> None:
    """A prompt; a shorter one, whose rows have the same bits; tokens behind it, together and alone."""
    case = CASES[name]
    want = expected(case, 150)
    limit = max({"f32": 4e-6, "f16": 1e-3, "bf16": 8e-3}[kind] for kind in (case.io, case.cache))
    whole = feed(bundle, name, 150, 0)
    assert (np.abs(whole - want).max(axis=(1, 2)) <= limit * np.abs(want).max()).all()
    np.testing.assert_array_equal(feed(bundle, name, 66, 0), whole[:66])
    behind = feed(bundle, name, 20, 130)
    assert (np.abs(behind - want[130:]).max(axis=(1, 2)) <= limit * np.abs(want).max()).all()
    alone = feed(bundle, name, 1, 130, "one" if name in ONE else "some")
    np.testing.assert_array_equal(alone, behind[:1])
