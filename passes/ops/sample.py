"""``halfbyte::sample``: the next token, drawn from logits."""

from __future__ import annotations

import torch

from halfbyte.passes.ops.float32 import flush
from halfbyte.passes.ops.library import LIBRARY
from halfbyte.passes.ops.swiglu import LEAST, exponential

# A weight is a whole number of 2^-30 of the most likely token's, so that sums do not depend on their order.
UNITS = 2.0**30

LIBRARY.define("sample(Tensor logits, Tensor settings) -> Tensor")


def sample(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Draws a token: the most likely one, or one of the likelier ones by a given random number.

    A token's weight is exp((logit - largest) / temperature), in float32 (`exponential`; 0 below exp(-87)), in whole
    units of 2^-30, cut off. Tokens are taken by falling logit, of equal ones the lower token first: all, or top_k of
    them, then the fewest whose weights sum to at least top_p of those taken. Of them, in the order of their numbers,
    the first is drawn with which the sum of the weights exceeds random times the whole, cut off to units. Products of
    sums are float64.

    Args:
        logits: float32 [V].
        settings: float32 [4]: temperature, of which 0 or less takes the largest logit whatever follows; top_k, cut off
            to a whole number, of which 0 or less takes all; top_p, of which 1 or more takes all; random, from 0 up to,
            but not, 1.

    Returns:
        int64 [1]: the token; -1 where a logit is NaN or +inf, or all are -inf.
    """
    temperature, top_k, top_p, random = settings.unbind()
    x = flush(logits)
    x = torch.where(x == 0, torch.zeros_like(x), x)
    largest = x.max()
    if not bool(torch.isfinite(largest)):  # NaN if there is one
        return torch.tensor([-1])
    if not bool(temperature > 0):
        return torch.nonzero(x == largest)[0]
    z = flush(flush(x - largest) / temperature)
    weight = torch.where(z > LEAST, exponential(z), torch.zeros_like(z))
    units = (weight * UNITS).to(torch.int64)
    taken = torch.sort(x, descending=True, stable=True).indices
    if 0 < int(top_k) < len(taken):
        taken = taken[: int(top_k)]
    if bool(top_p < 1):
        sums = units[taken].cumsum(0)
        least = max(1, int(top_p.double() * sums[-1].double()))
        taken = taken[: int((sums < least).sum()) + 1]
    taken = taken.sort().values
    sums = units[taken].cumsum(0)
    drawn = max(0, min(int(random.double() * sums[-1].double()), int(sums[-1]) - 1))
    return taken[(sums <= drawn).sum()].reshape(1)


def _fake(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    torch._check(
        logits.dim() == 1 and logits.dtype == torch.float32,
        lambda: f"logits must be float32 [V], not {logits.dtype} {list(logits.shape)}",
    )
    torch._check(
        tuple(settings.shape) == (4,) and settings.dtype == torch.float32,
        lambda: f"settings must be float32 [4], not {settings.dtype} {list(settings.shape)}",
    )
    return logits.new_empty(1, dtype=torch.int64)


LIBRARY.impl("sample", sample, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::sample", _fake, lib=LIBRARY)
