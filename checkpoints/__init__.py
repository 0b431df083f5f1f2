"""From checkpoint files to a model in halfbyte's graph language: one file per format.

`open_checkpoint` opens a folder or file by its headers; `build_model` makes the model with quantized modules
in place, `load_float_model` the same model with all weights dequantized.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.checkpoints.checkpoint import Checkpoint, FloatInfo, LayerInfo
    from halfbyte.checkpoints.model import build_model, load_float_model
    from halfbyte.checkpoints.registry import open_checkpoint

__all__ = ["Checkpoint", "FloatInfo", "LayerInfo", "build_model", "load_float_model", "open_checkpoint"]

# Imported on first use: they bring torch.
_HOMES = {
    "Checkpoint": "checkpoint",
    "FloatInfo": "checkpoint",
    "LayerInfo": "checkpoint",
    "build_model": "model",
    "load_float_model": "model",
    "open_checkpoint": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
