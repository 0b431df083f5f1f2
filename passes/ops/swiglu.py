"""SwiGLU as the kernels compute it: an exponential of stated steps, so that references and kernels give equal bits."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush, fma

# exp(z) = 2^n * exp(r), n = round(z / ln 2), r = z - n * ln2 in two parts, exp(r) by its Taylor polynomial of degree 6.
LEAST, MOST = -87.0, 88.0
LOG2E = 1.4426950216293335
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06
POLYNOMIAL = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number
# gelu's tanh form is x / (1 + exp(x (c1 + c3 x^2))): c1 = -2 sqrt(2 / pi), c3 = 0.044715 c1.
GELU_SLOPE, GELU_CUBE = -1.5957691669464111, -0.07135481387376785
# gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), gate at most and up within the limit.
OAI_SLOPE = 1.7020000219345093


def exponential(z: torch.Tensor) -> torch.Tensor:
    """float32 exp(z) to 2e-7, for z cut to [-87, 88]; NaN counts as 88."""
    f = lambda value: torch.tensor(value, dtype=torch.float32)  # noqa: E731
    z = torch.where(z < MOST, z, f(MOST))
    z = torch.where(z > LEAST, z, f(LEAST))
    n = (fma(z, f(LOG2E), f(_MAGIC))) - f(_MAGIC)
    r = fma(n, f(-LN2_LOW), fma(n, f(-LN2_HIGH), z))
    p = f(POLYNOMIAL[0]).expand_as(r)
    for coefficient in POLYNOMIAL[1:]:
        p = fma(p, r, f(coefficient))
    return (p.contiguous().view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def swiglu(gate: torch.Tensor, up: torch.Tensor, kind: str, limit: float) -> torch.Tensor:
    """float32 ``gate / (1 + exp(-gate)) * up`` (kind ``silu``), every operation rounded on its own.

    Kind ``gelu_tanh`` is ``gelu(gate, approximate="tanh") * up``, as Gemma's layers have it.
    Kind ``oai`` is gpt-oss's: ``gate / (1 + exp(-1.702 gate)) * (up + 1)`` with gate cut to at most ``limit`` and
    up to at most ``limit`` in magnitude, as in transformers' ``GptOssExperts``.
    """
    bound = torch.tensor(limit, dtype=torch.float32)
    if kind == "oai":
        gate = torch.where(gate > bound, bound, gate)
        up = torch.where(up > bound, bound, torch.where(up < -bound, -bound, up))
        slope = flush(gate * torch.tensor(OAI_SLOPE, dtype=torch.float32))
        return flush(flush(gate / (1 + exponential(-slope))) * (up + 1))
    z = -gate
    if kind == "gelu_tanh":
        f = lambda value: torch.tensor(value, dtype=torch.float32)  # noqa: E731
        z = flush(gate * fma(flush(gate * gate), f(GELU_CUBE), f(GELU_SLOPE)))
    return flush(flush(gate / (1 + exponential(z))) * up)
