"""QuantTensor: what it holds, what it refuses, how it dequantizes; nibbles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_layers import KINDS, random_weight
from torch_bridge import nibbles, quant_tensor

from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import QuantTensor, pack_nibbles, unpack_nibbles


@pytest.mark.parametrize("inputs", [1, 2, 7, 8, 35, 64])
def test_nibbles_hold_even_inputs_low(inputs: int) -> None:
    codes = np.random.default_rng(inputs).integers(0, 16, (5, inputs)).astype(np.uint8)
    packed = pack_nibbles(torch.from_numpy(codes))
    np.testing.assert_array_equal(packed.numpy(), nibbles(codes))
    np.testing.assert_array_equal(unpack_nibbles(packed, inputs).numpy(), codes)


def test_nibbles_written_out() -> None:
    codes = torch.tensor([[1, 2, 3], [15, 0, 8]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x03], [0x0F, 0x08]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("inputs", "group_size"), [(96, 32), (100, 32), (35, 35), (13 * 32, 32)])
def test_dequantizes_by_group(kind: str, scale: str, inputs: int, group_size: int) -> None:
    """Cases 15 and 29: an odd number of groups, a ragged last group."""
    weight = random_weight(1, 6, inputs, group_size, kind, scale)
    exact = weight.dequantized()
    got = quant_tensor("w", weight).dequantize().double().numpy()
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-7 * 16 * np.abs(exact).max())
    if kind != "minimum":
        np.testing.assert_array_equal(got, exact.astype(np.float32).astype(np.float64))


def test_dequantizes_to_the_layers_own_input_order() -> None:
    weight = random_weight(1, 3, 16, 8, "symmetric")
    order = np.random.default_rng(1).permutation(16)
    source = quant_tensor("w", weight)
    permuted = QuantTensor("w", source.codes, source.scale, 8, permutation=torch.from_numpy(order))
    want = np.zeros((3, 16), np.float32)
    for column, place in enumerate(order):
        want[:, place] = weight.dequantized()[:, column]
    np.testing.assert_array_equal(permuted.dequantize().numpy(), want)


@pytest.mark.parametrize(("kind", "zero"), list(zip(KINDS, Zero, strict=True)))
def test_names_its_scheme(kind: str, zero: Zero) -> None:
    weight = quant_tensor("w", random_weight(1, 4, 64, 16, kind, "f16"))
    assert weight.scheme == WeightScheme(16, False, zero, "f16")
    assert weight.shape == (4, 64)
    whole = quant_tensor("w", random_weight(1, 4, 64, 64, kind, "bf16"))
    assert whole.scheme == WeightScheme(64, True, zero, "bf16")
    assert str(whole.scheme) == f"int4 {kind}, channelwise, bf16 scales"


def test_refuses_parts_that_do_not_belong_together() -> None:
    codes, scale = torch.zeros(4, 20, dtype=torch.uint8), torch.ones(4, 3)
    zero = torch.zeros(4, 3, dtype=torch.uint8)
    QuantTensor("w", codes, scale, 8, zero)
    wrong: list[tuple[type[Exception], tuple[object, ...]]] = [
        (ValueError, (codes, scale, 16)),
        (ValueError, (codes, scale, 0)),
        (ValueError, (codes, torch.ones(3, 4), 8)),
        (ValueError, (codes, scale, 8, zero[:, :2])),
        (ValueError, (codes, scale, 8, None, torch.ones(3, 3))),
        (TypeError, (codes.to(torch.int32), scale, 8)),
        (TypeError, (codes, scale.double(), 8)),
        (TypeError, (codes, scale, 8, zero.to(torch.int32))),
        (TypeError, (codes, scale, 8, zero, scale)),
        (TypeError, (codes, scale, 8, None, scale.half())),
    ]
    for error, parts in wrong:
        with pytest.raises(error, match=r"^a\.layer: "):
            QuantTensor("a.layer", *parts)  # type: ignore[arg-type]
