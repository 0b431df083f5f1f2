"""OpenVINO: a matrix product of a dequantized i4 constant, which its CPU plugin keeps compressed.

pip install openvino
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
from openvino import opset13

from peers import Problem


class OpenVino:
    """float32 in and out. With dynamic quantization, activations become int8 per group of inputs."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic

    def build(self, problem: Problem) -> None:
        core, self.requests, self.keep = openvino.Core(), [], []
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(problem.threads),
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(problem.group if self.dynamic else 0),
        }
        for codes, scale in zip(problem.codes, problem.scales, strict=True):
            outputs, inputs = codes.shape
            shape = openvino.Shape([outputs, inputs // problem.group, problem.group])
            signed = codes ^ 8  # two's complement nibbles of u - 8
            packed = np.ascontiguousarray(signed[:, 0::2] | (signed[:, 1::2] << 4))
            self.keep += [packed, openvino.Tensor(packed, shape, openvino.Type.i4)]
            weight = opset13.convert(opset13.constant(self.keep[-1]), "f16")
            weight = opset13.multiply(weight, opset13.constant(scale[:, :, None].astype(np.float16)))
            weight = opset13.reshape(weight, opset13.constant(np.array([outputs, inputs])), False)
            x = opset13.parameter([-1, inputs], openvino.Type.f32)
            y = opset13.result(opset13.matmul(x, opset13.convert(weight, "f32"), False, True))
            model = openvino.Model([y], [x], "linear")
            self.requests.append(core.compile_model(model, "CPU", settings).create_infer_request())
        self.outputs = problem.outputs

    def calls(self, x: np.ndarray[Any, Any]) -> list[Callable[[], Any]]:
        out = []
        for request in self.requests:
            y = np.zeros((x.shape[0], self.outputs), np.float32)
            request.set_input_tensor(openvino.Tensor(x, shared_memory=True))
            request.set_output_tensor(openvino.Tensor(y, shared_memory=True))
            self.keep += [x, y]

            def call(request: Any = request, y: Any = y) -> Any:
                request.infer()
                return y

            out.append(call)
        return out

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        return np.array(returned)
