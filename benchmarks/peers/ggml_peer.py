"""ggml, the engine of llama.cpp: Q4_0 or Q8_0 weights, activations int8 per block of 32 inputs.

    CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_BUILD_TOOLS=OFF" \\
        pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

The package is only where the shared libraries come from; they are called directly. Q4_0 weights go into ggml's
own repacked layout where it has one for this CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from peers import Problem

F32, Q4_0, Q8_0, I32 = 0, 2, 8, 26
_BLOCK = 32
_Pointer, _Size, _Int, _Long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


class _InitParameters(ctypes.Structure):
    _fields_ = [("memory", _Size), ("buffer", _Pointer), ("no_alloc", ctypes.c_bool)]


# function -> result, arguments
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_Pointer, [_InitParameters]),
    "ggml_new_tensor_2d": (_Pointer, [_Pointer, _Int, _Long, _Long]),
    "ggml_new_tensor_3d": (_Pointer, [_Pointer, _Int, _Long, _Long, _Long]),
    "ggml_mul_mat_id": (_Pointer, [_Pointer, _Pointer, _Pointer, _Pointer]),
    "ggml_swiglu_split": (_Pointer, [_Pointer, _Pointer, _Pointer]),
    "ggml_mul": (_Pointer, [_Pointer, _Pointer, _Pointer]),
    "ggml_mul_mat": (_Pointer, [_Pointer, _Pointer, _Pointer]),
    "ggml_new_graph": (_Pointer, [_Pointer]),
    "ggml_build_forward_expand": (None, [_Pointer, _Pointer]),
    "ggml_nbytes": (_Size, [_Pointer]),
    "ggml_backend_cpu_init": (_Pointer, []),
    "ggml_backend_cpu_set_n_threads": (None, [_Pointer, _Int]),
    "ggml_backend_cpu_buffer_type": (_Pointer, []),
    "ggml_backend_cpu_reg": (_Pointer, []),
    "ggml_backend_reg_get_proc_address": (_Pointer, [_Pointer, ctypes.c_char_p]),
    "ggml_backend_reg_dev_get": (_Pointer, [_Pointer, _Size]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_Pointer]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_Pointer, [_Pointer, _Pointer]),
    "ggml_backend_buffer_set_usage": (None, [_Pointer, _Int]),
    "ggml_backend_tensor_set": (None, [_Pointer, _Pointer, _Size, _Size]),
    "ggml_backend_tensor_get": (None, [_Pointer, _Pointer, _Size, _Size]),
    "ggml_backend_graph_compute": (_Int, [_Pointer, _Pointer]),
}


class _Library:
    """The functions of ggml's shared libraries, by name."""

    def __init__(self) -> None:
        package = find_spec("llama_cpp")
        if package is None or package.origin is None:
            raise ImportError("llama-cpp-python is not installed; peers/ggml_peer.py says how")
        folder = Path(package.origin).parent / "lib"
        libraries = [
            ctypes.CDLL(str(sorted(folder.glob(f"lib{name}.so*"))[0]), mode=ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu", "ggml")
        ]
        for name, (result, arguments) in _SIGNATURES.items():
            function = next(getattr(library, name) for library in libraries if hasattr(library, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


class Ggml:
    """One graph per copy of the layer: a matrix product."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def build(self, problem: Problem) -> None:
        self._start(problem.threads)
        library, self.outputs = self.library, problem.outputs
        context = self._context(len(problem.codes))
        kind = Q4_0 if self.bits == 4 else Q8_0
        self.weights = [
            library.ggml_new_tensor_2d(context, kind, problem.inputs, problem.outputs) for _ in problem.codes
        ]
        place = (self._repacked() if self.bits == 4 else None) or self.plain  # Q8_0 has no packed kernels
        buffer = library.ggml_backend_alloc_ctx_tensors_from_buft(context, place)
        library.ggml_backend_buffer_set_usage(buffer, 1)  # weights
        for tensor, codes, scale in zip(self.weights, problem.codes, problem.scales, strict=True):
            packed = self._pack(codes, scale, problem.group)
            assert packed.nbytes == library.ggml_nbytes(tensor)
            library.ggml_backend_tensor_set(tensor, packed.ctypes.data, 0, packed.nbytes)

    def _start(self, threads: int) -> None:
        self.library = library = _Library()
        self.backend = library.ggml_backend_cpu_init()
        library.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.plain = library.ggml_backend_cpu_buffer_type()

    def calls(self, x: np.ndarray[Any, Any]) -> list[Callable[[], Any]]:
        library, context = self.library, self._context(2 * len(self.weights) + 1)
        rows = library.ggml_new_tensor_2d(context, F32, x.shape[1], x.shape[0])
        products = [library.ggml_mul_mat(context, weight, rows) for weight in self.weights]
        library.ggml_backend_alloc_ctx_tensors_from_buft(context, self.plain)
        library.ggml_backend_tensor_set(rows, np.ascontiguousarray(x).ctypes.data, 0, x.nbytes)
        graphs = []
        for product in products:
            graph = library.ggml_new_graph(self._context(1))
            library.ggml_build_forward_expand(graph, product)
            graphs.append(graph)

        def call(graph: Any, product: Any) -> Any:
            assert library.ggml_backend_graph_compute(self.backend, graph) == 0
            return product, len(x)

        return [lambda g=g, p=p: call(g, p) for g, p in zip(graphs, products, strict=True)]

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        product, rows = returned
        out = np.empty((rows, self.outputs), np.float32)
        self.library.ggml_backend_tensor_get(product, out.ctypes.data, 0, out.nbytes)
        return out

    def _context(self, tensors: int) -> Any:
        return self.library.ggml_init(_InitParameters(tensors * 512 + (1 << 20), None, True))

    def _repacked(self) -> Any:
        """The buffer type that packs weights for this CPU's kernels, or None."""
        library = self.library
        registry = library.ggml_backend_cpu_reg()
        address = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(_Pointer), _Pointer)(address)(
            library.ggml_backend_reg_dev_get(registry, 0)
        )
        index = 0
        while listed and listed[index]:
            if b"REPACK" in library.ggml_backend_buft_name(listed[index]).upper():
                return listed[index]
            index += 1
        return None

    def _pack(
        self, codes: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], group: int
    ) -> np.ndarray[Any, Any]:
        """Blocks of a float16 scale and 32 codes: halves of nibbles in Q4_0, signed bytes in Q8_0."""
        blocks = codes.reshape(len(codes), -1, _BLOCK)
        if self.bits == 4:
            values = blocks[..., :16] | blocks[..., 16:] << 4
        else:
            values = (blocks.astype(np.int8) - 8).view(np.uint8)
        factors = np.repeat(scale.astype(np.float16), group // _BLOCK, axis=1)[..., None].view(np.uint8)
        return np.ascontiguousarray(np.concatenate([factors, values], axis=2))
