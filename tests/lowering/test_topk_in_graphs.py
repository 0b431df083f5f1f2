"""``torch.topk`` in compiled graphs: torch's own choice, of equal values too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from topk_twin import adversary, topk
from vulkan_device import no_device

import halfbyte
from halfbyte.runtime import Bundle

# Values per row, how many are taken, in order, dtype: experts of the families, a heap (64 k <= E), all, a single one.
KINDS = [
    *((6, 2, True, "f32"), (8, 2, True, "bf16"), (60, 4, True, "f32"), (64, 6, False, "f32")),
    *((64, 8, True, "f16"), (128, 8, True, "f32"), (128, 2, True, "f32"), (256, 8, False, "f32")),
    *((256, 4, True, "bf16"), (9, 9, True, "f32"), (1, 1, True, "f32"), (512, 10, True, "f32")),
    *((33, 17, True, "f32"), (160, 1, False, "f32"), (40, 20, True, "f32")),
]
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROWS = (0, 1, 9, 70)


class _TopK(torch.nn.Module):
    """Many in one program, of tensors of three dimensions."""

    def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out: list[torch.Tensor] = []
        for x, (_, k, in_order, _) in zip(xs, KINDS, strict=True):
            out += torch.topk(x, k, -1, sorted=in_order)
        return tuple(out)


@pytest.fixture(scope="module", params=["cpu", "vulkan", "cuda"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if request.param != "cpu" and no_device(request.param):
        pytest.skip(no_device(request.param))
    rows = torch.export.Dim("T", min=0, max=4096)
    xs = tuple(torch.zeros(2, 5, width, dtype=TORCH[io]) for width, _, _, io in KINDS)
    program = torch.export.export(_TopK(), xs, dynamic_shapes=(tuple({1: rows} for _ in xs),))
    options = halfbyte.CompileOptions(target=request.param)
    compiled = halfbyte.compile(program, tmp_path_factory.mktemp("topk") / "bundle", options)
    return halfbyte.load(compiled.path, device=request.param)


def given(rows: int, width: int, io: str) -> torch.Tensor:
    """Few values, so that many are equal; rows that are all equal, sorted, or hold NaN, infinities and both zeros."""
    random = torch.Generator().manual_seed(rows + width)
    x = (torch.randn(2, rows, width, generator=random) * 1.5).round()
    if rows > 8:
        x[0, 0], x[0, 1] = 3, torch.arange(width)
        x[0, 2], x[0, 3] = -torch.arange(width), torch.arange(width) % 7
        x[0, 4, ::3], x[0, 5, ::2], x[0, 6] = float("nan"), float("-inf"), float("-inf")
        x[0, 7], x[0, 7, ::2] = 0.0, -0.0
        x[1, 0] = torch.randn(width, generator=random) * 1e-40  # subnormal
        x[1, 1], x[1, 2, ::5] = torch.arange(width).flip(0) % 4, float("inf")
        x[1, 3] = torch.tensor(adversary(width)).float()  # bad medians of three until the depth is exhausted
    return x.to(TORCH[io])


@pytest.mark.parametrize("rows", ROWS)
def test_equal_values_are_chosen_as_torch_does(bundle: Bundle, rows: int) -> None:
    xs = [given(rows, width, io) for width, _, _, io in KINDS]
    carriers = [x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy() for x in xs]
    found = bundle.call("forward", *carriers)
    for x, values, places, (width, k, in_order, io) in zip(xs, found[0::2], found[1::2], KINDS, strict=True):
        want = torch.topk(x, k, -1, sorted=in_order)
        if k > 17:  # argmaxes: the first of equal ones, but for NaN, infinities and what is flushed to zero
            clear = x.isfinite().all(-1) & ((x == 0) | (x.abs() > 1e-37)).all(-1)
            first = torch.sort(x, stable=True, dim=-1, descending=True).indices[..., :k]
            np.testing.assert_array_equal(places[clear.numpy()], first[clear].numpy())
            continue
        np.testing.assert_array_equal(places, want.indices.numpy(), err_msg=f"{k} of {width}")
        made = torch.from_numpy(np.array(values))
        made = made.view(torch.bfloat16) if io == "bf16" else made
        np.testing.assert_array_equal(made.float().numpy(), want.values.float().numpy())
        if rows > 8:
            for row in (0, 4, 7, rows - 1):
                assert topk(x[0, row].tolist(), k, in_order) == want.indices[0, row].tolist()


def test_one_token_has_a_static_program(tmp_path: Path) -> None:
    class Route(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = torch.topk(x, 3)
            return found.values, found.indices

    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0, 1.0, 2.0]])
    bundle = halfbyte.load(halfbyte.compile(torch.export.export(Route(), (x,)), tmp_path / "bundle").path)
    values, places = bundle.call("forward", x.numpy())
    assert places.tolist() == torch.topk(x, 3).indices.tolist() and values.tolist() == [[2.0, 2.0, 2.0]]
