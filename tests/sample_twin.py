"""``halfbyte::sample`` in numpy, written from its description: a loop over sorted tokens."""

from __future__ import annotations

import numpy as np
from moe_twin import exponential
from numpy_twin import Array, flushed


def sample(logits: Array, settings: Array) -> int:
    temperature, top_k, top_p, random = (np.float32(value) for value in settings)
    x = flushed(logits)
    x[x == 0] = 0.0
    if np.isnan(x).any() or x.max() in (np.inf, -np.inf):
        return -1
    if not temperature > 0:
        return int(np.argmax(x))
    with np.errstate(all="ignore"):
        z = flushed(flushed(x - x.max()) / temperature)
    units = [
        int(weight * np.float32(2**30)) if far > -87 else 0
        for weight, far in zip(exponential(z), z, strict=True)
    ]
    tokens = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if int(top_k) > 0:
        tokens = tokens[: int(top_k)]
    if top_p < 1:
        least = max(1, int(np.float64(top_p) * np.float64(sum(units[token] for token in tokens))))
        kept, gathered = [], 0
        while gathered < least:
            kept.append(tokens[len(kept)])
            gathered += units[kept[-1]]
        tokens = kept
    mark = int(np.float64(random) * np.float64(sum(units[token] for token in tokens)))
    for token in sorted(tokens):
        mark -= units[token]
        if mark < 0:
            return token
    raise AssertionError("the random number is too large")
