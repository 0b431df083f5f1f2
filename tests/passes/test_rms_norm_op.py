"""``halfbyte::rms_norm`` agrees with its shapes, has torch's numbers but for roundings, and refuses the rest."""

from __future__ import annotations

import contextlib

import pytest
import torch
from random_layers import random_activations
from torch_bridge import tensor

from halfbyte.passes.ops.float32 import root

CHECKS = ("test_schema", "test_faketensor")
ops = torch.ops.halfbyte


def test_the_operators_agree_with_their_shapes() -> None:
    x, weight = torch.randn(2, 3, 40), torch.rand(40)
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-5, False, False), test_utils=CHECKS)
    torch.library.opcheck(ops.rms_norm.default, (x.half(), None, 1e-5, False, True), test_utils=CHECKS)
    merged = (x, 4, 3, 10, torch.rand(10), 1e-5, True, False)
    torch.library.opcheck(ops.rms_norm_merged.default, merged, test_utils=CHECKS)


def test_heads_of_wider_rows_are_those_by_themselves() -> None:
    x, weight = torch.randn(5, 64), torch.rand(10)
    got = ops.rms_norm_merged(x, 4, 3, 10, weight, 1e-5, True, False)
    want = ops.rms_norm(x[:, 4:34].reshape(5, 3, 10), weight, 1e-5, True, False)
    assert torch.equal(got, want.flatten(1))


@pytest.mark.parametrize("io", ["f16", "bf16"])
def test_rows_of_sixteen_bits_have_the_bits_of_torch(io: str) -> None:
    """Where the sums agree to more than a value's precision, both roundings of a family do."""
    x = tensor(random_activations(1, 200, 96, io))
    assert x is not None
    weight = (torch.rand(96) + 0.5).to(x.dtype)
    even = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    for rounds, want in ((True, even.to(x.dtype) * weight), (False, (even * weight.float()).to(x.dtype))):
        got = ops.rms_norm(x, weight, 1e-5, False, rounds)
        assert (got != want).float().mean() < 2e-3
    assert (ops.rms_norm(x, weight, 1e-5, False, True) != want).float().mean() > 0.05


def test_roots_are_exact_in_tensors_of_any_size() -> None:
    x = torch.rand(100_000)
    one_by_one = torch.tensor([value**0.5 for value in x.tolist()], dtype=torch.float32)
    assert torch.equal(root(x), one_by_one)


@pytest.mark.parametrize("fake", [True, False])
def test_what_does_not_fit_is_refused(fake: bool) -> None:
    with torch._subclasses.FakeTensorMode() if fake else contextlib.nullcontext():
        x = torch.empty(2, 40)
        with pytest.raises(RuntimeError, match=r"the weight must be floats \[40\], not \[30\]"):
            ops.rms_norm(x, torch.empty(30), 1e-5, False, False)
        with pytest.raises(RuntimeError, match="float32, float16 or bfloat16, not torch"):
            ops.rms_norm(x.double(), None, 1e-5, False, False)
        with pytest.raises(RuntimeError, match="rows must hold at least one value"):
            ops.rms_norm(x[:, :0], None, 1e-5, False, False)
        with pytest.raises(RuntimeError, match="3 heads of 16 from column 0 of 40"):
            ops.rms_norm_merged(x, 0, 3, 16, None, 1e-5, False, False)
