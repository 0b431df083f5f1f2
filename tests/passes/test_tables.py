"""Embeddings that stay as they are stored give the rows of the dequantized table, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halfbyte.passes.tables import FloatTable, IntegerTable
from halfbyte.passes.weight import FLOAT_DTYPES, QuantTensor

IDS = torch.tensor([[0, 6, 6], [4, 1, 0]])


@pytest.mark.parametrize(("bits", "width", "group"), [(8, 96, 32), (8, 80, 16), (4, 72, 32), (8, 40, 40)])
@pytest.mark.parametrize("scales", ["f16", "f32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_integers(bits: int, width: int, group: int, scales: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(width)
    codes = rng.integers(0, 1 << bits, (7, width)).astype(np.uint8)
    scale = torch.from_numpy(rng.normal(size=(7, -(-width // group)))).to(FLOAT_DTYPES[scales])
    weight = QuantTensor("table", torch.from_numpy(codes), scale, group, bits=bits)
    table = IntegerTable(weight.scheme, (7, width), dtype).fill(weight)
    wide = np.repeat(scale.float().numpy(), group, -1)[:, :width]
    want = (codes.astype(np.float32) - np.float32(1 << (bits - 1))) * wide
    got = table(IDS)
    assert got.dtype == dtype and torch.equal(got, torch.from_numpy(want[IDS.numpy()]).to(dtype))


def test_only_one_rounding_is_taken() -> None:
    codes, scale = torch.zeros(7, 64, dtype=torch.uint8), torch.ones(7, 2)
    for more in ({"zero": torch.zeros(7, 2, dtype=torch.uint8)}, {"minimum": torch.ones(7, 2)}):
        with pytest.raises(ValueError, match="a table in int8"):
            IntegerTable(
                QuantTensor("table", codes, scale, 32, bits=8, **more).scheme, (7, 64), torch.float32
            )


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [None, torch.tensor(24**0.5)])
def test_rows_of_sixteen_bits(stored: torch.dtype, factor: torch.Tensor | None) -> None:
    table = FloatTable((7, 24), stored, torch.float32, factor)
    table.weight.data.normal_()
    assert torch.equal(table(IDS), table.weight.float()[IDS] * (1 if factor is None else factor))
