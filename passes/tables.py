"""Embeddings whose tables stay as the file has them: rows are gathered first, and widened then."""

from __future__ import annotations

import torch

from halfbyte.passes.scheme import WeightScheme, Zero
from halfbyte.passes.weight import FLOAT_DTYPES, QuantTensor


class _Table(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, factor: torch.Tensor | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("factor", None if factor is None else factor.to(dtype), persistent=False)

    def rows(self, wide: torch.Tensor) -> torch.Tensor:
        """Rounds gathered rows to the dtype, and multiplies them by the factor of families that have one."""
        rounded = wide.to(self.dtype)
        return rounded * self.factor if isinstance(self.factor, torch.Tensor) else rounded


class FloatTable(_Table):
    """An embedding in 16 bits within a model of 32: its rows are exact, and its table half as large.

    Args:
        shape: (V, K).
        stored: dtype of the table.
        dtype: of the rows that `forward` gives.
        factor: a scalar that rows are multiplied by, in ``dtype`` (Gemma's ``embed_scale``).
    """

    def __init__(
        self,
        shape: tuple[int, int],
        stored: torch.dtype,
        dtype: torch.dtype,
        factor: torch.Tensor | None = None,
    ) -> None:
        super().__init__(dtype, factor)
        self.weight = _empty(shape, stored)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., K]."""
        return self.rows(torch.nn.functional.embedding(ids, self.weight))


class IntegerTable(_Table):
    """An embedding in integers: ``W[v, k] = scale[v, g(k)] * integer[v, k]``, to the bits of the dequantized table.

    Args:
        scheme: how the table is quantized; symmetric, so that there is one rounding.
        shape: (V, K).
        dtype: of the rows that `forward` gives.
        factor: as of `FloatTable`.
    """

    def __init__(
        self,
        scheme: WeightScheme,
        shape: tuple[int, int],
        dtype: torch.dtype,
        factor: torch.Tensor | None = None,
    ) -> None:
        super().__init__(dtype, factor)
        if scheme.zero is not Zero.SYMMETRIC or scheme.act_order:
            raise ValueError(f"a table in {scheme}")
        rows, width = shape
        self.group_size = scheme.group_size
        self.integers = _empty(shape, torch.int8)
        self.scale = _empty((rows, -(-width // scheme.group_size)), FLOAT_DTYPES[scheme.scale_dtype])

    def fill(self, weight: QuantTensor) -> IntegerTable:
        """Puts real tensors in place of the empty ones and returns self."""
        self.integers.data, self.scale.data = weight.integers(), weight.scale
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., K]."""
        codes = torch.nn.functional.embedding(ids, self.integers).float()
        scale = torch.nn.functional.embedding(ids, self.scale).float()
        width = codes.shape[-1]
        wide = scale[..., None].expand(*scale.shape, self.group_size).flatten(-2)[..., :width]
        return self.rows(codes * wide)


def _empty(shape: tuple[int, int], dtype: torch.dtype) -> torch.nn.Parameter:
    """Memory that nothing has touched: it is filled when the archive is written, which reads the file anew."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
