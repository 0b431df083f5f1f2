"""halfbyte compiles PyTorch models with int4-quantized linear layers into portable IREE programs.

    halfbyte.inspect(model)               what a checkpoint holds, from its headers
    halfbyte.rewrite(module_or_program)   quantized linears of a graph -> halfbyte::linear
    halfbyte.compile(model, out)          checkpoint or graph -> bundle
    halfbyte.load(bundle)                 bundle -> callable functions, generation
    halfbyte.verify(bundle, model)        every layer against its reference, logits against the float model

`halfbyte.runtime` alone needs neither torch nor the compiler; everything here is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    from halfbyte.compile_model import compile_model as compile
    from halfbyte.inspect_model import inspect
    from halfbyte.lowering.options import CompileOptions
    from halfbyte.progress import Progress
    from halfbyte.rewrite_model import rewrite
    from halfbyte.runtime import load
    from halfbyte.verify_model import verify
    from halfbyte.write_bundle import Compiled

__version__ = "0.3.0"
__all__ = [
    "CompileOptions",
    "Compiled",
    "HalfbyteError",
    "Progress",
    "compile",
    "inspect",
    "load",
    "rewrite",
    "verify",
]

_HOMES = {
    "CompileOptions": ("halfbyte.lowering.options", "CompileOptions"),
    "Compiled": ("halfbyte.write_bundle", "Compiled"),
    "Progress": ("halfbyte.progress", "Progress"),
    "compile": ("halfbyte.compile_model", "compile_model"),
    "inspect": ("halfbyte.inspect_model", "inspect"),
    "load": ("halfbyte.runtime", "load"),
    "rewrite": ("halfbyte.rewrite_model", "rewrite"),
    "verify": ("halfbyte.verify_model", "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
