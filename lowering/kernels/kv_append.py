"""``halfbyte::kv_append``, ``rotate_append`` and ``latent_append``: new rows into caches, in place."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.lowering.kernels.generator import RmsNorm, render
from halfbyte.lowering.kernels.platform import CPU, Platform
from halfbyte.passes.ops.kv_append import MOST_NORMED_HEADS

_LANES = 16


@dataclass(frozen=True)
class Rotation:
    """Which columns of a head are turned: ``pairs`` of them, side by side if ``interleaved``, else ``pairs`` apart."""

    pairs: int
    interleaved: bool


@dataclass(frozen=True)
class KvAppend:
    """``kv_append.mlir.j2``.

    Attributes:
        key_width, value_width: of a head.
        io: dtype of what is new.
        cache: dtype of the caches.
        rotation: of queries and keys, or None.
        platform: the kind of device.
        merged: queries, keys and values stand side by side in a row, all of one width; with a rotation.
        norm: of queries and keys before they are turned, where they are merged.
        norm_weight: dtype of its weights.
        norm_rounds: what is normed is rounded to io before the weight multiplies it.
        latent: there are values alone, and what fills up their columns becomes 0.
    """

    key_width: int
    value_width: int
    io: str
    cache: str = "f32"
    rotation: Rotation | None = None
    platform: Platform = CPU
    merged: bool = False
    norm: RmsNorm | None = None
    norm_weight: str = ""
    norm_rounds: bool = False
    latent: bool = False

    @property
    def symbol(self) -> str:
        kind, turned = "latent" if self.latent else "kv", ""
        if self.rotation is not None:
            kind = "rotate_merged" if self.merged else "rotate"
            turned = f"_r{self.rotation.pairs}{'i' if self.rotation.interleaved else ''}"
        types = f"{self.io}_{self.cache}{self.platform.suffix(self.io, self.cache, self.norm_weight)}"
        if self.norm is not None:
            turned += f"_{self.norm}_{self.norm_weight}{'_rounds' * self.norm_rounds}"
        return f"halfbyte_{kind}_append_{self.key_width}x{self.value_width}{turned}_{types}"

    def text(self) -> str:
        padded = -(-self.value_width // 16) * 16
        planes = [
            {"start": start, "width": width, "used": used, "vector": _divisor(used)}
            for start in range(0, padded, 64)
            for width in [min(64, padded - start)]
            for used in [min(width, self.value_width - start)]
        ]
        pairs = self.rotation.pairs if self.rotation else 0
        return render(
            self.platform.template("kv_append"),
            name=self.symbol,
            D=self.key_width,
            Dv=self.value_width,
            Dv16=padded,
            io=self.io,
            cache=self.cache,
            rotated=self.rotation is not None,
            merged=self.merged,
            latent=self.latent,
            norm=self.norm,
            width=self.key_width,
            weight=self.norm_weight,
            rounds=self.norm_rounds,
            interleaved=self.rotation is not None and self.rotation.interleaved,
            pairs=pairs,
            turn=_divisor(pairs),
            rest=_divisor(self.key_width - 2 * pairs),
            whole=_divisor(self.key_width),
            planes=planes,
            tokens=16,
            most_heads=MOST_NORMED_HEADS,
            **self.platform.values,
        )


def _divisor(count: int) -> int:
    """The widest vector that divides a number of columns."""
    return next(lanes for lanes in (_LANES, 8, 4, 2, 1) if count % lanes == 0)
