"""ONNX Runtime: com.microsoft.QMoE, which routes by itself. Level 4 quantizes activations to int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from peers.moe_problem import Array, MoeProblem


def _packed(codes: Array) -> Array:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


class OnnxRuntimeMoe:
    """Rows of gate and up take turns in its first weight."""

    def __init__(self, accuracy_level: int) -> None:
        self.level = accuracy_level

    def build(self, problem: MoeProblem) -> None:
        up, up_scale, down, down_scale = [], [], [], []
        for expert in range(problem.experts):
            (gate, gate_scale), (raise_, raise_scale) = (problem.weight(expert, p) for p in ("gate", "up"))
            both = np.stack([gate, raise_], 1).reshape(2 * problem.inner, problem.hidden)
            up.append(_packed(both))
            up_scale.append(np.stack([gate_scale, raise_scale], 1).reshape(2 * problem.inner, -1))
            codes, scale = problem.weight(expert, "down")
            down.append(_packed(codes))
            down_scale.append(scale)
        named = {"w1": up, "s1": up_scale, "w2": down, "s2": down_scale}
        tensors = [numpy_helper.from_array(np.stack(value), name) for name, value in named.items()]
        node = helper.make_node(
            "QMoE",
            ["x", "router", "w1", "s1", "", "w2", "s2"],
            ["y"],
            domain="com.microsoft",
            k=problem.slots,
            activation_type="swiglu",
            swiglu_fusion=1,
            activation_alpha=1.0,
            activation_beta=0.0,
            normalize_routing_weights=1,
            expert_weight_bits=4,
            block_size=problem.group,
            accuracy_level=self.level,
        )
        info = helper.make_tensor_value_info
        inputs = [
            info("x", TensorProto.FLOAT, ["T", problem.hidden]),
            info("router", TensorProto.FLOAT, ["T", problem.experts]),
        ]
        outputs = [info("y", TensorProto.FLOAT, ["T", problem.hidden])]
        graph = helper.make_graph([node], "moe", inputs, outputs, tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = problem.threads, 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options)

    def call(self, x: Array, logits: Array, ids: Array, factors: Array) -> Callable[[], Any]:
        return lambda: self.session.run(None, {"x": x, "router": logits})[0]

    def result(self, returned: Any) -> Array:
        return np.asarray(returned)
