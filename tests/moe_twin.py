"""The arithmetic of halfbyte's experts in numpy, written from its description."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy_twin import Array, Weight, flushed, fma, linear
from random_layers import random_weight


@dataclass(frozen=True)
class Experts:
    """gate, up [I, H] and down [H, I] of every expert."""

    gate: list[Weight]
    up: list[Weight]
    down: list[Weight]
    glu: str = "silu"
    limit: float = 0.0


def random_experts(
    seed: int,
    experts: int,
    hidden: int,
    middle: int,
    groups: tuple[int, int],
    kind: str = "integer",
    scale: str = "f32",
    bias: bool = False,
    bits: int = 4,
    glu: str = "silu",
    levels: str = "integers",
) -> Experts:
    """Experts that all differ, of sizes that keep sums within what silu tells apart."""

    def make(which: int, expert: int, outputs: int, inputs: int, group: int) -> Weight:
        settings = (kind, scale, bias, bits, levels)
        weight = random_weight(seed + 100 * expert + which, outputs, inputs, group, *settings)
        size = np.float32(2.0 ** (-8 if bits == 8 or levels == "iq4nl" else -4))
        small = (weight.scale.astype(np.float32) * size).astype(weight.scale.dtype)
        minimum = weight.minimum
        if minimum is not None:
            minimum = (minimum.astype(np.float32) * size).astype(minimum.dtype)
        return replace(weight, scale=small, minimum=minimum)

    return Experts(
        [make(1, e, middle, hidden, groups[0]) for e in range(experts)],
        [make(2, e, middle, hidden, groups[0]) for e in range(experts)],
        [make(3, e, hidden, middle, groups[1]) for e in range(experts)],
        glu,
        7.0 if glu == "oai" else 0.0,
    )


def exponential(z: Array) -> Array:
    """float32, by the stated steps."""
    one = np.float32
    z = np.where(z < one(88), z, one(88)).astype(np.float32)
    z = np.where(z > one(-87), z, one(-87)).astype(np.float32)
    magic = one(1.5 * 2**23)
    n = fma(z, one(1.4426950216293335), magic) - magic
    r = fma(n, one(-1.428606765330187e-06), fma(n, one(-0.693145751953125), z))
    p = np.full_like(r, one(1 / 720))
    for c in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = fma(p, r, one(c))
    return (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)


def glu(gate: Array, up: Array, kind: str, limit: float) -> Array:
    one = np.float32(1)
    with np.errstate(all="ignore"):
        if kind == "oai":
            gate = np.where(gate > limit, np.float32(limit), gate)
            up = np.where(up > limit, np.float32(limit), np.where(up < -limit, np.float32(-limit), up))
            slope = flushed(gate * np.float32(1.702))
            return flushed(flushed(gate / (one + flushed(exponential(-slope)))) * (up + one))
        return flushed(flushed(gate / (one + flushed(exponential(-gate)))) * up)


def moe(x: Array, ids: Array, weights: Array, experts: Experts, digits: int) -> Array:
    """[T, H] of the dtype of x."""
    wide, total = x.astype(np.float32), np.zeros(x.shape, np.float32)
    with np.errstate(all="ignore"):
        for token in range(len(x)):
            for slot, expert in enumerate(ids[token]):
                if not 0 <= expert < len(experts.gate):
                    continue
                row = wide[token : token + 1]
                gate = linear(row, experts.gate[expert], digits)
                up = linear(row, experts.up[expert], digits)
                middle = glu(gate, up, experts.glu, experts.limit)
                down = linear(middle, experts.down[expert], digits)[0]
                total[token] = flushed(total[token] + flushed(down * np.float32(weights[token, slot])))
        return total.astype(x.dtype)
