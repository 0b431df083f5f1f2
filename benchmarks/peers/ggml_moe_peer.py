"""ggml: the experts of a layer by ggml_mul_mat_id, with Q4_0 weights in its repacked layout where this CPU has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from peers.ggml_peer import F32, I32, Q4_0, Ggml
from peers.moe_problem import Array, MoeProblem


class GgmlMoe(Ggml):
    """gate, up, their product, down, and the product with the slots' weights; their sum is left out."""

    def __init__(self) -> None:
        super().__init__(4)

    def build(self, problem: Any) -> None:
        assert isinstance(problem, MoeProblem)
        self._start(problem.threads)
        self.problem = problem
        self.gate, self.up, self.down = (self._stacked(part) for part in ("gate", "up", "down"))

    def _stacked(self, part: str) -> Any:
        problem, library, context = self.problem, self.library, self._context(1)
        outputs, inputs = (
            (problem.hidden, problem.inner) if part == "down" else (problem.inner, problem.hidden)
        )
        tensor = library.ggml_new_tensor_3d(context, Q4_0, inputs, outputs, problem.experts)
        buffer = library.ggml_backend_alloc_ctx_tensors_from_buft(context, self._repacked() or self.plain)
        library.ggml_backend_buffer_set_usage(buffer, 1)  # weights
        packed = np.stack(
            [self._pack(*problem.weight(expert, part), problem.group) for expert in range(problem.experts)]
        )
        assert packed.nbytes == library.ggml_nbytes(tensor)
        library.ggml_backend_tensor_set(tensor, packed.ctypes.data, 0, packed.nbytes)
        return tensor

    def call(self, x: Array, logits: Array, ids: Array, factors: Array) -> Callable[[], Any]:
        library, problem, tokens = self.library, self.problem, len(x)
        context = self._context(16)
        rows = library.ggml_new_tensor_3d(context, F32, problem.hidden, 1, tokens)
        numbers = library.ggml_new_tensor_2d(context, I32, problem.slots, tokens)
        weights = library.ggml_new_tensor_3d(context, F32, 1, problem.slots, tokens)
        gate, up = (library.ggml_mul_mat_id(context, w, rows, numbers) for w in (self.gate, self.up))
        middle = library.ggml_swiglu_split(context, gate, up)
        down = library.ggml_mul_mat_id(context, self.down, middle, numbers)
        product = library.ggml_mul(context, down, weights)
        library.ggml_backend_alloc_ctx_tensors_from_buft(context, self.plain)
        for tensor, values in ((rows, x), (numbers, ids.astype(np.int32)), (weights, factors)):
            whole = np.ascontiguousarray(values)
            library.ggml_backend_tensor_set(tensor, whole.ctypes.data, 0, whole.nbytes)
        graph = library.ggml_new_graph(self._context(1))
        library.ggml_build_forward_expand(graph, product)

        def call() -> Any:
            assert library.ggml_backend_graph_compute(self.backend, graph) == 0
            return product, tokens

        return call

    def result(self, returned: Any) -> Array:
        product, tokens = returned
        out = np.empty((tokens, self.problem.slots, self.problem.hidden), np.float32)
        self.library.ggml_backend_tensor_get(product, out.ctypes.data, 0, out.nbytes)
        return np.asarray(out.sum(1))
