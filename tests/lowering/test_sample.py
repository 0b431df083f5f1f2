"""``halfbyte::sample``: the operator and its kernel against the twin, on every CPU that this machine can be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from foreign_cpu import AnyBundle, opened
from numpy_twin import Array
from sample_twin import sample
from test_kernels import Variant
from vulkan_device import no_device

import halfbyte
from halfbyte.lowering.kernels.isa import AVX2, AVX512BW, DOTPROD, PLAIN
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime.sampling import probabilities

SIZES = (1, 3, 16, 100, 1000, 4097)
CPUS = (
    Variant(AVX512BW, "x86-64-v4"),
    Variant(AVX2, "x86-64-v3"),
    Variant(PLAIN, "x86-64"),
    Variant(DOTPROD, "aarch64-dotprod"),
)
GPUS = ("vulkan", "cuda")


class Drawn(torch.nn.Module):
    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        settings, *rows = given
        return tuple(torch.ops.halfbyte.sample(row, settings) for row in rows)


@pytest.fixture(scope="module", params=[*CPUS, *GPUS], ids=lambda device: getattr(device, "cpu", device))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    on_gpu = request.param in GPUS
    if obstacle := no_device(request.param) if on_gpu else request.param.obstacle:
        pytest.skip(obstacle)
    rows = tuple(torch.zeros(size) for size in SIZES)
    program = torch.export.export(Drawn(), (torch.zeros(4), *rows), strict=False)
    chosen = {"target": request.param} if on_gpu else {"cpu": request.param.cpu}
    options = halfbyte.CompileOptions(**chosen)
    path = halfbyte.compile(program, tmp_path_factory.mktemp("sample") / "b", options).path
    if on_gpu:
        return halfbyte.load(path, device=request.param)
    return opened(path, CpuTarget.named(request.param.cpu))


def logits(size: int) -> Iterator[Array]:
    """Ordinary ones; few values, many of them equal; all equal; impossible tokens; zeros of both signs, subnormals."""
    random = np.random.default_rng(size)
    plain = random.normal(0, 4, size).astype(np.float32)
    yield plain
    yield np.round(plain / 3)
    yield np.full(size, -7.5, np.float32)
    never = np.where(np.arange(size) % 3 == 0, plain, -np.inf).astype(np.float32)
    yield never
    small = (plain * 1e-40).astype(np.float32)
    small[::2] *= np.float32(0.0)
    yield small
    yield np.where(plain > 0, np.float32(-0.0), -np.abs(plain))
    yield plain * np.float32(1e37)


SETTINGS = [
    *(
        (0.0, 0, 1.0, 0.3),
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.99999994),
        (1e-30, 0, 1.0, 0.5),
        (50.0, 0, 1.0, 0.4),
    ),
    *(
        (1.0, 1, 1.0, 0.9),
        (1.0, 2, 1.0, 0.9),
        (2.0, 50, 1.0, 0.61),
        (1.0, 10**6, 1.0, 0.5),
        (3.0, 7, 0.5, 0.7),
    ),
    *(
        (1.0, 0, 0.9, 0.95),
        (5.0, 0, 0.3, 0.2),
        (1.0, 0, 1e-9, 0.99),
        (9.0, 40, 0.95, 0.999),
        (1.0, 3, 0.999, 0.5),
    ),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_twin(bundle: AnyBundle, settings: tuple[float, ...]) -> None:
    given = np.array(settings, np.float32)
    for rows in zip(*(logits(size) for size in SIZES), strict=True):
        want = [sample(row.copy(), given) for row in rows]
        assert [int(token[0]) for token in bundle.call("forward", given, *rows)] == want
        tensors = map(torch.from_numpy, rows)
        got = [int(torch.ops.halfbyte.sample(row, torch.from_numpy(given))) for row in tensors]
        assert got == want


def test_no_token_of_what_is_no_number(bundle: AnyBundle) -> None:
    for bad in (np.nan, -np.float32(np.nan), np.inf, -np.inf):
        rows = [np.full(size, -np.inf if bad == -np.inf else 1.0, np.float32) for size in SIZES]
        for row in rows:
            row[len(row) // 2] = bad
        for temperature in (0.0, 1.0):
            given = np.array([temperature, 0, 1, 0.5], np.float32)
            assert {int(token[0]) for token in bundle.call("forward", given, *rows)} == {-1}
            assert sample(rows[0], given) == -1


def test_draws_as_often_as_the_runtime_would() -> None:
    """Each token's share of evenly spaced random numbers is its probability, to what the spacing allows."""
    row = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    count = 2000
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 12, 1.0), (1.5, 0, 0.8), (1.0, 20, 0.9)):
        want = probabilities(row, temperature=temperature, top_k=top_k, top_p=top_p)
        drawn = np.zeros(40)
        for number in range(count):
            given = np.array([temperature, top_k, top_p, number / count], np.float32)
            drawn[sample(row.copy(), given)] += 1
        assert np.abs(drawn / count - want).max() <= 2 / count
        assert not drawn[want == 0].any()


def test_the_operator_checks_its_shapes() -> None:
    torch.library.opcheck(
        torch.ops.halfbyte.sample.default,
        (torch.zeros(5), torch.zeros(4)),
        test_utils=("test_schema", "test_faketensor"),
    )
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(RuntimeError, match=r"logits must be float32 \[V\]"):
            torch.ops.halfbyte.sample(torch.zeros(2, 5), torch.zeros(4))
        with pytest.raises(RuntimeError, match=r"settings must be float32 \[4\]"):
            torch.ops.halfbyte.sample(torch.zeros(5), torch.zeros(3))
