"""The tensors of one layer, checked before they are used."""

from __future__ import annotations

import torch

from halfbyte.checkpoints.float_parameters import missing_tensor
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError
from halfbyte.passes.weight import FLOAT_DTYPES

# How scales are stored -> how they are kept: powers of two, which have no arithmetic of their own, as floats.
SCALE_DTYPES = {dtype: name for name, dtype in FLOAT_DTYPES.items()} | {torch.float8_e8m0fnu: "f32"}


def require(name: str, tensors: SafetensorsFolder, *parts: str) -> None:
    """Raises a `CheckpointError` that names the first missing tensor and the nearest names there are."""
    missing = [f"{name}.{part}" for part in parts if f"{name}.{part}" not in tensors]
    if missing:
        raise missing_tensor(missing, tensors, name)


def check(
    name: str,
    part: str,
    tensors: SafetensorsFolder,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    note: str = "",
) -> None:
    """Raises a `CheckpointError` when the tensor has another shape, or none of the dtypes."""
    stored = tensors[f"{name}.{part}"]
    if stored.shape != shape or stored.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(
            f"{part} does not fit the layer",
            where=f"{name}.{part}",
            found=f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}",
            accepted=f"{kinds} {list(shape)}{note}",
            advice="config.json and the weights are of different models, or the file is damaged",
        )


def read_scales(key: str, tensors: SafetensorsFolder) -> torch.Tensor:
    """The tensor of scales `key`, f16, bf16 or f32; those of 8 bits as f32, bytes as powers of two.

    Raises:
        CheckpointError: some are NaN or infinite.
    """
    scales = tensors.read(key)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dtype.itemsize == 1:
        scales = scales.float()
    bad = int((~torch.isfinite(scales)).sum())
    if bad:
        raise CheckpointError(
            "there are scales that are no numbers",
            where=key,
            found=f"{bad} NaN or infinite of {scales.numel()}",
            accepted="finite numbers",
            advice="the checkpoint is damaged, or its quantization failed",
        )
    return scales
