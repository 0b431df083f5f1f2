"""ONNX Runtime: com.microsoft.MatMulNBits. Level 4 quantizes activations to int8, level 1 keeps them float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from peers import Problem


class OnnxRuntime:
    """One session per copy of the layer."""

    def __init__(self, accuracy_level: int) -> None:
        self.level = accuracy_level

    def build(self, problem: Problem) -> None:
        self.sessions = []
        for codes, scale in zip(problem.codes, problem.scales, strict=True):
            outputs, inputs = codes.shape
            nibbles = (codes[:, 0::2] | (codes[:, 1::2] << 4)).reshape(outputs, inputs // problem.group, -1)
            tensors = [
                numpy_helper.from_array(nibbles, "B"),
                numpy_helper.from_array(scale.reshape(-1), "scales"),
            ]
            node = helper.make_node(
                "MatMulNBits",
                ["x", "B", "scales"],
                ["y"],
                domain="com.microsoft",
                K=inputs,
                N=outputs,
                bits=4,
                block_size=problem.group,
                accuracy_level=self.level,
            )
            x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", inputs])
            y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", outputs])
            graph = helper.make_graph([node], "linear", [x], [y], tensors)
            opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.inter_op_num_threads = problem.threads, 1
            options.log_severity_level = 3
            self.sessions.append(onnxruntime.InferenceSession(model.SerializeToString(), options))
        assert onnx is not None

    def calls(self, x: np.ndarray[Any, Any]) -> list[Callable[[], Any]]:
        out = []
        for session in self.sessions:
            binding = session.io_binding()
            binding.bind_cpu_input("x", x)
            binding.bind_output("y", "cpu")

            def call(session: Any = session, binding: Any = binding) -> Any:
                session.run_with_iobinding(binding)
                return binding

            out.append(call)
        return out

    def result(self, returned: Any) -> np.ndarray[Any, Any]:
        return np.asarray(returned.copy_outputs_to_cpu()[0])
