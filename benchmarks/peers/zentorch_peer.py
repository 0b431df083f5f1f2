"""AMD's zentorch: int4 weights with int8 dynamic activations, or bfloat16 ones.

pip install zentorch==2.13.0.2    (its version follows torch's)
"""

from __future__ import annotations

import numpy as np
import torch
import zentorch  # noqa: F401  registers torch.ops.zentorch

from peers import Problem
from peers.torch_peer import _Torch


class Zentorch(_Torch):
    """bfloat16 in and out."""

    dtype = torch.bfloat16

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic

    def build(self, problem: Problem) -> None:
        self._start(problem)
        ops = torch.ops.zentorch
        for codes, scale in zip(problem.codes, problem.scales, strict=True):
            signed = torch.from_numpy(np.ascontiguousarray(codes.astype(np.int8) - 8))
            packed, factors = ops.zentorch_woq_repack_weight(signed), torch.from_numpy(scale).t().contiguous()
            if self.dynamic:
                self.layers.append(lambda x, w=packed, s=factors: ops.zentorch_dynamic_qlinear(x, w, s))
            else:
                half = factors.bfloat16()
                self.layers.append(lambda x, w=packed, s=half: ops.zentorch_woq_linear(x, w.t(), s, None))
