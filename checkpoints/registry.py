"""Which reader opens which checkpoint: the one place that knows all formats."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from halfbyte.checkpoints.auto_round import AUTO_ROUND, open_auto_round
from halfbyte.checkpoints.auto_round_handover import other_method
from halfbyte.checkpoints.awq import open_awq
from halfbyte.checkpoints.checkpoint import Checkpoint
from halfbyte.checkpoints.compressed_tensors import open_compressed_tensors
from halfbyte.checkpoints.float_folder import open_float
from halfbyte.checkpoints.folder import path_inside
from halfbyte.checkpoints.fp8 import open_fp8
from halfbyte.checkpoints.gguf_file import open_gguf
from halfbyte.checkpoints.gptq import open_gptq
from halfbyte.checkpoints.hqq import CODES as HQQ_CODES
from halfbyte.checkpoints.hqq import open_hqq
from halfbyte.checkpoints.model_folder import ModelFolder, open_folder
from halfbyte.checkpoints.modelopt import open_modelopt
from halfbyte.checkpoints.mxfp4 import open_mxfp4
from halfbyte.checkpoints.safetensors_folder import holds_weights
from halfbyte.checkpoints.torchao import open_torchao
from halfbyte.checkpoints.w4afp8 import open_w4afp8
from halfbyte.errors import CheckpointError

# quant_method -> reader. A new format of folders is one file and one row.
READERS: dict[str, Callable[[ModelFolder], Checkpoint]] = {
    "awq": open_awq,
    "gptq": open_gptq,
    "hqq": open_hqq,
    **dict.fromkeys(AUTO_ROUND, open_auto_round),
    "compressed-tensors": open_compressed_tensors,
    "fp8": open_fp8,
    "modelopt": open_modelopt,
    "mxfp4": open_mxfp4,
    "torchao": open_torchao,
    "w4afp8": open_w4afp8,
}
# Methods that exist but that no reader here understands yet.
_NOT_YET = ("bitsandbytes",)


def open_checkpoint(path: str | os.PathLike[str], *, glance: bool = False) -> Checkpoint:
    """Opens a checkpoint by its headers: configuration, tensor headers and the small tensors of zero points.

    Args:
        path: a Hugging Face model folder, a folder that holds one .gguf file, or a .gguf file.
        glance: no weight will be read: a sample of the zero points of a layer stands for all of them.

    Raises:
        CheckpointError: nothing there, an unknown or unsupported kind, or anything malformed. Layers that
            cannot be compiled are no error here: their `LayerInfo.refusal` says why.
    """
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise CheckpointError("there is no such file or folder", where=str(path))
    if path.is_file():
        return open_gguf(_checked_file(path))
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not holds_weights(path):
        if len(ggufs) > 1:
            raise CheckpointError(
                "holds several GGUF files",
                where=path.name,
                found=", ".join(file.name for file in ggufs[:5]),
                accepted="one",
                advice="give the file itself",
            )
        return open_gguf(path_inside(path, ggufs[0].name, named_by=path.name), given=path)
    folder = open_folder(path, glance=glance)
    if ggufs:
        folder.warnings.append(f"the folder holds safetensors and {ggufs[0].name}: the safetensors are read")
    if folder.quantization is not None and folder.quantization.method in AUTO_ROUND:
        folder.quantization = other_method(folder.quantization) or folder.quantization
    return _reader(folder)(folder)


def _checked_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return path
    raise CheckpointError(
        "is no checkpoint that can be read by itself",
        where=path.name,
        accepted="a .gguf file, or a folder with config.json and *.safetensors",
        advice="give the folder" if path.suffix == ".safetensors" else None,
    )


def _reader(folder: ModelFolder) -> Callable[[ModelFolder], Checkpoint]:
    if folder.quantization is None:
        hqq = any(name.endswith(f".{HQQ_CODES}") for name in folder.tensors)
        return open_hqq if hqq else open_float
    method = folder.quantization.method
    reader = READERS.get(method)
    if reader is None:
        known = (
            f"{method!r} is a known method, but not supported yet by this version"
            if method in _NOT_YET
            else None
        )
        raise CheckpointError(
            known or "the quantization method is unknown",
            where=folder.quantization.where,
            found=f"quant_method {method!r}"[:200],
            accepted=", ".join([*READERS, "or none (float)"]),
        )
    return reader
