"""Random weights and activations that show mistakes: asymmetric, of rows, groups and columns that all differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy_twin import TYPES, Array, Weight

KINDS = ("symmetric", "integer", "minimum")


def random_weight(
    seed: int,
    outputs: int,
    inputs: int,
    group_size: int,
    kind: str = "integer",
    scale: str = "f32",
    bias: bool = False,
    bits: int = 4,
    levels: str = "integers",
) -> Weight:
    """Scales of both signs over two orders of magnitude; zero points and minima that differ everywhere."""
    random = np.random.default_rng(seed)
    groups = -(-inputs // group_size)
    sign = np.where(random.random((outputs, groups)) < 0.3, -1, 1)
    scales = (sign * np.exp(random.uniform(-5, -1, (outputs, groups)))).astype(TYPES[scale])
    return Weight(
        random.integers(0, 2**bits, (outputs, inputs)).astype(np.uint8),
        scales,
        group_size,
        random.integers(0, 2**bits, (outputs, groups)).astype(np.uint8) if kind == "integer" else None,
        random.normal(size=(outputs, groups)).astype(TYPES[scale]) if kind == "minimum" else None,
        (3 * random.normal(size=outputs)).astype(np.float32) if bias else None,
        bits,
        levels,
    )


def extreme_weight(
    seed: int, outputs: int, inputs: int, group_size: int, levels: str, scale: str = "f32"
) -> Weight:
    """A weight with a table, each output of which has one code everywhere: the largest sums of either sign."""
    weight = random_weight(seed, outputs, inputs, group_size, "symmetric", scale, levels=levels)
    codes = np.repeat(np.arange(outputs, dtype=np.uint8)[:, None] % 16, inputs, 1)
    return replace(weight, codes=codes)


def random_activations(seed: int, rows: int, inputs: int, io: str = "f32") -> Array:
    """Rows of different size and offset, some with outliers."""
    random = np.random.default_rng(seed)
    size = np.exp(random.uniform(-4, 4, (rows, 1)))
    x = size * (random.normal(size=(rows, inputs)) + 0.3)
    x[::3, random.integers(0, inputs)] *= 40
    return x.astype(TYPES[io])


def telling_rows(inputs: int, io: str = "f32") -> Array:
    """One row each: zeros, minus zeros, one value, ties, NaN, Inf, -Inf, subnormals, tiny, huge, ordinary, constant."""
    random = np.random.default_rng(inputs)
    plain = random.normal(size=inputs)
    largest = {"f32": 1e30, "f16": 6e4, "bf16": 1e30}[io]
    smallest = {"f32": 2.0**-120, "f16": 2.0**-20, "bf16": 2.0**-120}[io]
    subnormal = {"f32": 2.0**-130, "f16": 2.0**-16, "bf16": 2.0**-130}[io]
    one = np.zeros(inputs)
    one[inputs // 2] = -3.5
    ties = (np.arange(inputs) % 9 - 4) + 0.5
    ties[0] = 127.0  # the scale is exactly 1, so every other input is halfway between two codes
    nan, infinite, negative = plain.copy(), plain.copy(), plain.copy()
    nan[inputs - 1], infinite[0], negative[inputs // 3] = np.nan, np.inf, -np.inf
    rows = [
        np.zeros(inputs),
        -np.zeros(inputs),
        one,
        ties,
        nan,
        infinite,
        negative,
        plain * subnormal,
        plain * smallest,
        plain * largest / np.abs(plain).max(),
        plain,
        # Codes of 127, or digits of -128, everywhere: the largest sums.
        np.full(inputs, (63 * 2**16 - 128 * 2**8 - 128) / 2**22),
    ]
    return np.stack(rows).astype(TYPES[io])
