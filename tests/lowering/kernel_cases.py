"""Which linears the kernels are compared on: every pair of settings, and shapes that do not fit tiles."""

from __future__ import annotations

import functools

import numpy as np
from layer_bundles import Case
from numpy_twin import E4M3, TYPES, Array, linear
from random_layers import KINDS, extreme_weight, random_activations, random_weight, telling_rows

DIGITS, NAMES = (1, 2, 3), tuple(TYPES)
# N, K, group size. Columns that do not fill a tile of 64; K that no tile divides; ragged last groups, channelwise
# groups with K no multiple of 8, groups larger and smaller than 128, more than one panel of 128 inputs.
SHAPES = (
    *(
        (8, 8, 8),
        (65, 96, 32),
        (40, 192, 128),
        (20, 132, 132),
        (130, 520, 256),
        (5, 35, 35),
        (64, 1024, 1024),
    ),
    *(
        (24, 136, 24),
        (72, 384, 96),
        (12, 3, 3),
        (1, 48, 16),
        (129, 320, 64),
        (66, 200, 200),
        (16, 2056, 1024),
    ),
)
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 49, 97, 130)
# Up to four rows have a kernel of their own, more go in tiles of 16 or 32: both sides of the borders, several tiles.
GPU_ROWS = (0, 1, 2, 4, 5, 17, 33, 129)
MANY = 513
# The longest sums, and case 31: an odd number of groups that 128 does not divide.
LARGE = {"kernel_131072": (0, 1, 3, 9), "kernel_8256": (0, 1, 3, 9)}


def settings() -> list[tuple[int, str, str, str, bool]]:
    """18 of the 162 combinations of digits, zero points, io, scale dtype and bias: every pair of values occurs."""
    out = []
    for bias in (0, 1):
        for a in range(3):
            for b in range(3):
                io, scale = NAMES[(a + b + bias) % 3], NAMES[(a + 2 * b + bias) % 3]
                out.append((DIGITS[a], KINDS[b], io, scale, bool(bias)))
    return out


def cases() -> dict[str, Case]:
    """By name; three shapes for every combination."""
    out, seed = {}, 0
    for digits, kind, io, scale, bias in settings():
        for _ in range(3):
            outputs, inputs, group_size = SHAPES[seed % len(SHAPES)]
            mode = "int8" if digits == 1 else f"planes{digits}"
            name = f"{mode}_{kind}_{io}_{scale}_{'bias_' * bias}{outputs}x{inputs}_g{group_size}"
            weight = random_weight(seed, outputs, inputs, group_size, kind, scale, bias)
            out[name] = Case(name, weight, io, digits)
            seed += 1
    digits, kind, io, scale, bias = settings()[0]
    for name, shape in (("kernel_131072", (3, 131072, 131072)), ("kernel_8256", (24, 8256, 64))):
        for digits in (1, 3):
            _, kind, io, scale, bias = next(s for s in settings() if s[0] == digits)
            weight = random_weight(digits, *shape, kind, scale, bias)
            out[f"{name}_p{digits}"] = Case(f"{name}_p{digits}", weight, io, digits)
    for digits, bits in ((E4M3, 4), (1, 8), (2, 8), (3, 8)):
        for kind, io, scale, bias in (("symmetric", "f32", "f16", False), ("integer", "bf16", "f32", True)):
            for outputs, inputs, group_size in ((65, 96, 32), (24, 136, 24), (40, 1320, 1320)):
                mode = {E4M3: "e4m3", 1: "int8"}.get(digits, f"planes{digits}")
                name = f"w{bits}_{mode}_{kind}_{io}_{scale}_{outputs}x{inputs}_g{group_size}"
                weight = random_weight(seed, outputs, inputs, group_size, kind, scale, bias, bits)
                out[name] = Case(name, weight, io, digits)
                seed += 1
        weight = random_weight(seed, 40, 192, 128, "minimum", "f16", True, bits)
        out[f"w{bits}_{digits}_minimum"] = Case(f"w{bits}_{digits}_minimum", weight, "f32", digits)
    for levels, scale, modes in (("e2m1", "bf16", (1, 2, 3, E4M3)), ("iq4nl", "f16", (1, 2, 3))):
        for digits in modes:
            io, bias = ("f32", False) if digits in (1, 3) else ("bf16", True)
            mode = {E4M3: "e4m3", 1: "int8"}.get(digits, f"planes{digits}")
            for outputs, inputs, group_size in ((65, 96, 32), (40, 208, 16), (70, 35, 35)):
                name = f"{levels}_{mode}_{io}_{outputs}x{inputs}_g{group_size}"
                shape = (outputs, inputs, group_size)
                weight = random_weight(seed, *shape, "symmetric", scale, bias, levels=levels)
                out[name] = Case(name, weight, io, digits)
                seed += 1
        for digits in (1, 3):
            name = f"{levels}_extreme_{digits}"
            out[name] = Case(name, extreme_weight(seed, 24, 136, 24, levels, scale), "f32", digits)
        weight = random_weight(seed, 70, 1320, 1320, "symmetric", scale, levels=levels)
        out[f"{levels}_min_tokens"] = Case(f"{levels}_min_tokens", weight, "f32", 1, min_tokens=4)
    for few in (2, 3):
        _, kind, io, scale, bias = next(s for s in settings() if s[0] == few and s[4])
        weight = random_weight(few, 70, 192, 64, kind, scale, bias)
        out[f"min_tokens_{few}"] = Case(f"min_tokens_{few}", weight, io, 1, min_tokens=4, few=few)
    return out


CASES = cases()


def _with_many_rows() -> set[str]:
    """One case of every mode, of several blocks of columns."""
    out: dict[tuple[int, int], str] = {}
    for name, case in CASES.items():
        outputs, inputs = case.weight.codes.shape
        if outputs > 64 and inputs < 400 and not case.min_tokens:
            out.setdefault((case.digits, case.weight.bits), name)
    return set(out.values())


WITH_MANY_ROWS = _with_many_rows()


def rows_of(case: Case, usual: tuple[int, ...] = ROWS) -> tuple[int, ...]:
    """Ascending."""
    usual = LARGE.get(case.name.rpartition("_")[0], usual)
    return (*usual, MANY) if case.name in WITH_MANY_ROWS else usual


@functools.cache
def activations(name: str) -> Array:
    """Ordinary rows with the telling ones among the first, as many as the largest batch."""
    case = CASES[name]
    rows, inputs = max(rows_of(case)), case.weight.codes.shape[1]
    if rows < 20:
        x = random_activations(1, rows, inputs, case.io)
        x[1] = np.abs(x[1])
        return x
    random = random_activations(inputs, rows, inputs, case.io)
    return np.concatenate([random[:3], telling_rows(inputs, case.io), random])[:rows]


@functools.cache
def expected(name: str, digits: int) -> Array:
    """The twin's outputs. A batch's are the first of these, since rows do not touch each other."""
    return linear(activations(name), CASES[name].weight, digits)
