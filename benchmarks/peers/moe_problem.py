"""A layer of routed experts with symmetric int4 weights, and the peers that compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MoeProblem:
    """The layer; the shape is Qwen3-30B-A3B's unless told otherwise."""

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    slots: int = 8
    group: int = 128
    threads: int = 1
    cpu: str = "host"

    def weight(self, expert: int, part: str) -> tuple[Array, Array]:
        """codes uint8 [N, K] 0..15 and scale float32 [N, K / group] of ``gate``, ``up`` or ``down``."""
        random = np.random.default_rng((expert, ("gate", "up", "down").index(part)))
        shape = (self.hidden, self.inner) if part == "down" else (self.inner, self.hidden)
        codes = random.integers(0, 16, shape, dtype=np.uint8)
        # Few enough bits to be exact in any 16-bit float.
        steps = random.integers(128, 256, (shape[0], shape[1] // self.group)).astype(np.float32)
        return codes, steps * np.float32(2.0**-15)

    def routed(self, tokens: int, seed: int) -> tuple[Array, Array, Array, Array]:
        """x float32 [T, H], router logits float32 [T, E], ids int64 [T, k], factors float32 [T, k] that sum to 1."""
        random = np.random.default_rng((tokens, seed))
        x = random.standard_normal((tokens, self.hidden)).astype(np.float32)
        logits = 2 * random.standard_normal((tokens, self.experts)).astype(np.float32)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, : self.slots].astype(np.int64)
        raw = np.exp(np.take_along_axis(logits, ids, 1))
        return x, logits, ids, (raw / raw.sum(1, keepdims=True)).astype(np.float32)

    def exact(self, x: Array, ids: Array, factors: Array) -> Array:
        """float64 [T, H] with the dequantized weights."""
        out = np.zeros(x.shape)
        for expert in np.unique(ids):
            rows, slots = np.where(ids == expert)
            gate, up, down = (self._dense(int(expert), part) for part in ("gate", "up", "down"))
            wide = x[rows].astype(np.float64)
            g = wide @ gate.T
            out[rows] += ((g / (1 + np.exp(-g)) * (wide @ up.T)) @ down.T) * factors[rows, slots, None]
        return out

    def _dense(self, expert: int, part: str) -> Array:
        codes, scale = self.weight(expert, part)
        dense: Array = (codes.astype(np.float64) - 8) * np.repeat(scale, self.group, 1)
        return dense


class MoePeer(Protocol):
    """One engine."""

    def build(self, problem: MoeProblem) -> None:
        """Packs the experts as the engine wants them."""

    def call(self, x: Array, logits: Array, ids: Array, factors: Array) -> Callable[[], Any]:
        """A function that computes the layer for these tokens; engines that route take the logits."""

    def result(self, returned: Any) -> Array:
        """float32 [T, H] from what a call returned."""


# name -> module, class, arguments
MOE_PEERS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "halfbyte": ("halfbyte_moe_peer", "HalfbyteMoe", ("int8",)),
    "halfbyte_float": ("halfbyte_moe_peer", "HalfbyteMoe", ("none",)),
    "halfbyte_fp8": ("halfbyte_moe_peer", "HalfbyteMoe", ("fp8",)),
    "halfbyte_e4m3": ("halfbyte_moe_peer", "HalfbyteFp8Moe", ("fp8",)),
    "halfbyte_e4m3_float": ("halfbyte_moe_peer", "HalfbyteFp8Moe", ("none",)),
    "ort": ("onnxruntime_moe_peer", "OnnxRuntimeMoe", (4,)),
    "ort_float": ("onnxruntime_moe_peer", "OnnxRuntimeMoe", (0,)),
    "ggml": ("ggml_moe_peer", "GgmlMoe", ()),
    "zentorch": ("zentorch_moe_peer", "ZentorchMoe", ()),
}


def make_moe(name: str) -> MoePeer:
    """The peer of a name in `MOE_PEERS`."""
    module, kind, arguments = MOE_PEERS[name]
    peer: MoePeer = getattr(import_module(f"peers.{module}"), kind)(*arguments)
    return peer
