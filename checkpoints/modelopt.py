"""Checkpoints with ModelOpt's configuration: NVFP4, and what TensorRT-LLM's script makes of DeepSeek's (W4AFP8).

The script takes quantization_config out of config.json and writes hf_quant_config.json with ``{"quantization":
{"quant_algo": "MIXED_PRECISION"}}``, which leaves open what is quantized and how. The tensors are those of ``w4afp8``
and are read as such; other algorithms of ModelOpt store other tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from halfbyte.checkpoints.model_folder import ModelFolder
from halfbyte.checkpoints.modelopt_nvfp4 import open_nvfp4
from halfbyte.checkpoints.quantized_folder import QuantizedFolder
from halfbyte.checkpoints.w4afp8 import open_w4afp8
from halfbyte.errors import CheckpointError

_NVFP4, _MIXED = "NVFP4", "MIXED_PRECISION"
# What the script's own code does: blocks of DeepSeek's, groups of 128 inputs.
_DEFAULTS = {"weight_block_size": [128, 128], "group_size": 128}


def open_modelopt(folder: ModelFolder) -> QuantizedFolder:
    """A folder with the configuration of ModelOpt.

    Raises:
        CheckpointError: another algorithm, or no layer with int4 codes in the manner of ``w4afp8``.
    """
    assert folder.quantization is not None
    values, where = folder.quantization.values, folder.quantization.where
    inner = values.get("quantization")
    said: dict[str, Any] = inner if isinstance(inner, dict) else values
    algorithm = said.get("quant_algo")
    if algorithm == _NVFP4:
        return open_nvfp4(folder, said, where)
    int4 = _int4_layers(folder)
    if algorithm != _MIXED or not int4:
        raise CheckpointError(
            "this kind of ModelOpt checkpoint is not supported",
            where=where,
            found=f"quant_algo {algorithm!r}, {int4} layers with int4 codes and weight_scale_inv"[:200],
            accepted=f"{_NVFP4}, or {_MIXED} with int4 layers beside e4m3 ones (W4AFP8)",
            advice="export the model in the format of compressed-tensors",
        )
    folder.warnings.append(
        f"{where} says only {_MIXED}: {int4} layers have the tensors of w4afp8 and are read as such, "
        "with groups of 128 inputs and blocks of 128 x 128"
    )
    ignored = said.get("exclude_modules")
    known = _DEFAULTS | ({"ignored_layers": ignored} if ignored is not None else {})
    folder.quantization = dataclasses.replace(folder.quantization, method="w4afp8", values=known)
    return open_w4afp8(folder)


def _int4_layers(folder: ModelFolder) -> int:
    return sum(
        folder.tensors[name].dtype == torch.int8
        and f"{name.removesuffix('weight')}weight_scale_inv" in folder.tensors
        for name in folder.tensors
        if name.endswith(".weight")
    )
