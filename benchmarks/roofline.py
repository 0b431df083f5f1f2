"""A roofline: what kernels reach, between what memory and what arithmetic allow. One SVG file, no dependencies."""

from __future__ import annotations

import math
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 560, 70, 200, 30, 60
_COLORS = ("#0b6e4f", "#c84630", "#3a5a9b", "#8b5fbf", "#b8860b", "#444444")
_MODES = ("w4a8", "w8a8", "w4a16bf16", "w4a16", "w4afp8", "fp8", "fp8a16")


# A roof of `limits.measure` -> its name in the picture.
_UNITS = {
    "tile_gmacs": "int8 tiles",
    "bf16_tile_gmacs": "bf16 tiles",
    "dot_gmacs": "int8 dot",
    "fma_gmacs": "f32 FMA",
    "bf16_gmacs": "bf16 dot",
}


def _top(limits: dict[str, Any]) -> float:
    return max(limits[unit] or 0.0 for unit in _UNITS)


class _Axes:
    """Logarithmic axes: MAC per byte of weights across, GMAC/s up."""

    def __init__(self, rows: list[dict[str, Any]], limits: dict[str, Any]) -> None:
        across = [intensity(row) for row in rows]
        up = [row["gmacs"] for row in rows] + [_top(limits)]
        self.x0, self.x1 = math.log10(min(across)) - 0.2, math.log10(max(across)) + 0.2
        self.y0, self.y1 = math.log10(min(up)) - 0.2, math.log10(max(up)) + 0.2

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.x0) / (self.x1 - self.x0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.y0) / (self.y1 - self.y0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def intensity(row: dict[str, Any]) -> float:
    """Multiply-adds per byte of the int4 (or int8) weights."""
    weight_bytes = 1.0 if row["mode"] in ("w8a8", "w8a16", "fp8", "fp8a16") else 0.5
    return float(row["m"] / (weight_bytes + 2 / row["group"]))


def draw(rows: list[dict[str, Any]], limits: dict[str, Any]) -> str:
    """An SVG of `linear.py`'s rows with one thread against `limits.measure`'s numbers."""
    rows = [row for row in rows if row["threads"] == 1]
    axes = _Axes(rows, limits)
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        *_grid(axes),
        *_roofs(axes, limits),
    ]
    for row in rows:
        color = _COLORS[peers.index(row["peer"]) % len(_COLORS)]
        x, y = axes.x(intensity(row)), axes.y(row["gmacs"])
        label = escape(
            f"{row['peer']} {row['mode']} {row['k']}x{row['n']} m={row['m']}: {row['gmacs']} GMAC/s"
        )
        parts.append(_mark(row["mode"], x, y, color, row["cold"]) + f"<title>{label}</title></path>")
    parts += _legend(peers, sorted({row["mode"] for row in rows}))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(axes: _Axes) -> list[str]:
    out = []
    for power in range(math.ceil(axes.x0), math.floor(axes.x1) + 1):
        x = axes.x(10**power)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        out.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{10**power:g}</text>'
        )
    for power in range(math.ceil(axes.y0), math.floor(axes.y1) + 1):
        y = axes.y(10**power)
        out.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10**power:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(
        f'<text x="{middle}" y="{_HEIGHT - 15}" text-anchor="middle">multiply-adds per byte of weights</text>'
    )
    out.append(
        f'<text x="18" y="{_HEIGHT / 2}" transform="rotate(-90 18 {_HEIGHT / 2})">GMAC/s, one thread</text>'
    )
    return out


def _roofs(axes: _Axes, limits: dict[str, Any]) -> list[str]:
    out = []
    right = 10**axes.x1
    top = _top(limits)
    for unit, name in _UNITS.items():
        if not limits[unit]:
            continue
        y = axes.y(limits[unit])
        out.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#888" stroke-dasharray="6 3"/>'
        )
        out.append(
            f'<text x="{_WIDTH - _RIGHT + 4}" y="{y + 4:.1f}">{name}: {limits[unit]:.0f} GMAC/s</text>'
        )
    for size, rate in limits["read_gbs"].items():
        start = max(10**axes.x0, 10**axes.y0 / rate)
        end = min(right, top / rate)
        if start < end:
            out.append(
                f'<line x1="{axes.x(start):.1f}" y1="{axes.y(start * rate):.1f}" x2="{axes.x(end):.1f}" '
                f'y2="{axes.y(end * rate):.1f}" stroke="#bbb"><title>{size} MiB: {rate} GB/s</title></line>'
            )
    return out


def _mark(mode: str, x: float, y: float, color: str, cold: bool) -> str:
    shapes = {
        "w4a8": f"M{x - 5:.1f},{y:.1f}a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
        "w8a8": f"M{x - 5:.1f},{y - 5:.1f}h10v10h-10z",
        "w8a16": f"M{x - 6:.1f},{y - 4:.1f}h12v8h-12z",
        "fp4a8": f"M{x - 3:.1f},{y:.1f}a3,6 0 1,0 6,0a3,6 0 1,0 -6,0",
        "fp4a16": f"M{x:.1f},{y - 6:.1f}l4,12h-8z",
        "w4a16": f"M{x:.1f},{y - 6:.1f}l6,11h-12z",
        "w4a16bf16": f"M{x:.1f},{y + 6:.1f}l6,-11h-12z",
        "fp8": f"M{x - 6:.1f},{y:.1f}l6,-6l6,6l-12,0z",
        "fp8a16": f"M{x - 6:.1f},{y:.1f}l6,6l6,-6l-12,0z",
        "w4afp8": f"M{x:.1f},{y - 6:.1f}l6,6l-6,6l-6,-6z",
    }
    fill = "white" if cold else color
    return f'<path d="{shapes[mode]}" fill="{fill}" stroke="{color}">'


def _legend(peers: list[str], modes: list[str]) -> list[str]:
    out, x, y = [], _WIDTH - _RIGHT + 20, _HEIGHT - _BOTTOM - 18 * (len(peers) + len(modes)) - 10
    for index, peer in enumerate(peers):
        color = _COLORS[index % len(_COLORS)]
        out.append(f'<rect x="{x - 5}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{x + 12}" y="{y}">{escape(peer)}</text>')
        y += 18
    for mode in modes:
        out.append(
            _mark(mode, x, y - 4, "#444", False) + "</path>" + f'<text x="{x + 12}" y="{y}">{mode}</text>'
        )
        y += 18
    return out
