"""Engines that compute the same linear layer, one file each.

A peer is a class with ``build(problem)`` and ``calls(x)``; `PEERS` names them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Problem:
    """A linear layer of symmetric int4 weights: codes uint8 [N, K] 0..15, scale float32 [N, ceil(K / group)].

    Scales are exact in float16 and bfloat16. ``copies`` layers differ in their weights, so that a walk through
    them finds each one cold.
    """

    codes: list[np.ndarray[Any, Any]]
    scales: list[np.ndarray[Any, Any]]
    group: int
    threads: int
    cpu: str = "host"  # what halfbyte compiles for; the others look for themselves

    @property
    def outputs(self) -> int:
        return int(self.codes[0].shape[0])

    @property
    def inputs(self) -> int:
        return int(self.codes[0].shape[1])


class Peer(Protocol):
    """One engine in one mode."""

    def build(self, problem: Problem) -> None:
        """Packs the weights as the engine wants them."""

    def calls(self, x: np.ndarray[Any, Any]) -> list[Callable[[], Any]]:
        """One function per copy of the layer, each computing x @ W^T from float32 x [M, K]."""

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        """float32 [M, N] from what a call returned."""


# name -> module, class, arguments. The mode is part of the name: w4a8 and w8a8 quantize activations to int8 per token
# (ggml and ONNX Runtime per block), w4a16 keeps them float32, w4a16bf16 bfloat16, w4afp8 makes them e4m3. fp4a8 and
# fp4a16 have MXFP4's weights. fp8 has e4m3 weights and activations, fp8a16 e4m3 weights alone; their peer is a dense
# product in bfloat16.
PEERS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "halfbyte_w4a8": ("halfbyte_peer", "Halfbyte", ("int8", "f32", "int4")),
    "halfbyte_w4a16": ("halfbyte_peer", "Halfbyte", ("none", "f32", "int4")),
    "halfbyte_w4a16bf16": ("halfbyte_peer", "Halfbyte", ("none", "bf16", "int4")),
    "halfbyte_w8a8": ("halfbyte_peer", "Halfbyte", ("int8", "f32", "int8")),
    "halfbyte_w4afp8": ("halfbyte_peer", "Halfbyte", ("fp8", "f32", "int4")),
    "halfbyte_fp4a8": ("halfbyte_peer", "Halfbyte", ("int8", "f32", "e2m1")),
    "halfbyte_fp4a16": ("halfbyte_peer", "Halfbyte", ("none", "f32", "e2m1")),
    "halfbyte_w8a16": ("halfbyte_peer", "Halfbyte", ("none", "f32", "int8")),
    "halfbyte_fp8": ("halfbyte_peer", "Halfbyte", ("fp8", "f32", "e4m3")),
    "halfbyte_fp8a16": ("halfbyte_peer", "Halfbyte", ("none", "bf16", "e4m3")),
    "ggml_w4a8": ("ggml_peer", "Ggml", (4,)),
    "ggml_w8a8": ("ggml_peer", "Ggml", (8,)),
    "ort_w4a8": ("onnxruntime_peer", "OnnxRuntime", (4,)),
    "ort_w4a16": ("onnxruntime_peer", "OnnxRuntime", (1,)),
    "openvino_w4a8": ("openvino_peer", "OpenVino", (True,)),
    "openvino_w4a16": ("openvino_peer", "OpenVino", (False,)),
    "torch_w4a16": ("torch_peer", "TorchDense", ("float32",)),
    "torch_w4a16bf16": ("torch_peer", "TorchDense", ("bfloat16",)),
    "torch_w4afp8": ("torch_peer", "TorchDense", ("bfloat16",)),
    "torch_fp8": ("torch_peer", "TorchDense", ("bfloat16",)),
    "torch_fp8a16": ("torch_peer", "TorchDense", ("bfloat16",)),
    "torch_w8a8": ("torch_peer", "TorchInt8", ()),
    "torchao_w4a16bf16": ("torch_peer", "TorchaoInt4", ()),
    "zentorch_w4a8": ("zentorch_peer", "Zentorch", (True,)),
    "zentorch_w4a16bf16": ("zentorch_peer", "Zentorch", (False,)),
}
MODES = ("w4a8", "w4a16", "w4a16bf16", "w8a8", "w8a16", "w4afp8", "fp4a8", "fp4a16", "fp8", "fp8a16")


def make(name: str) -> Peer:
    """The peer of a name in `PEERS`."""
    module, kind, arguments = PEERS[name]
    peer: Peer = getattr(import_module(f"peers.{module}"), kind)(*arguments)
    return peer
