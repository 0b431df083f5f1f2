"""Experts that a file holds stacked, [E, ...], seen as the tensors of single linears.

transformers keeps them so in memory, and files written without its conversion have ``experts.gate_up_proj`` and
``experts.down_proj``, as gpt-oss and Llama 4 always do; Granite's call them ``input_linear`` and ``output_linear``.
Packed and scaled parts are stacked slice by slice: ``experts.gate_up_proj.weight_packed`` [E, 2I, ceil(H / 8)]; so are
transformers' own e4m3 experts, ``experts.gate_up_proj_scale_inv`` [E, 2I / 128, H / 128], and gpt-oss's of mxfp4,
``experts.gate_up_proj_blocks`` [E, 2I, H / 32, 16].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from halfbyte.checkpoints.experts import ExpertsShape
from halfbyte.checkpoints.safetensors_file import StoredTensor
from halfbyte.checkpoints.safetensors_folder import SafetensorsFolder
from halfbyte.errors import CheckpointError

_ZERO_POINTS = "weight_zero_point"  # compressed-tensors packs them along the outputs, eight to a word
_BLOCKS = "blocks"  # mxfp4's codes, a dimension for the groups of inputs
_PARTS = (
    *("weight", "bias", "weight_packed", "weight_scale", "weight_scale_inv", _ZERO_POINTS),
    *(_BLOCKS, "scales"),
)
_SCALES = ("weight_scale", "weight_scale_inv")
_SHAPE = "weight_shape"
_OUTPUTS_PER_WORD = 8


@dataclass(frozen=True)
class _Part(StoredTensor):
    """Some outputs of one expert.

    Attributes:
        whole: the expert's tensor.
        first, step: which rows.
        transposed: after the whole was transposed.
    """

    whole: StoredTensor
    first: int
    step: int
    transposed: bool

    def read(self) -> torch.Tensor:
        found = self.whole.read()
        rows = (found.T if self.transposed else found)[self.first :: self.step]
        return rows[: self.shape[0]].contiguous()

    def rows(self, *numbers: int) -> torch.Tensor:
        return self.read()[list(numbers)]


def split_stacked(tensors: SafetensorsFolder, experts: Mapping[str, ExpertsShape]) -> None:
    """Puts the parts of single experts in place of stacked tensors.

    Args:
        tensors: of the folder; changed.
        experts: by the path of a module in the file.

    Raises:
        CheckpointError: a stacked tensor that does not fit the model.
    """
    for path, shape in experts.items():
        block = path.rpartition(".")[0]
        stems = {f"{path}.gate_up_proj": "both", f"{block}.input_linear": "both"}
        stems |= {f"{path}.down_proj": "down", f"{block}.output_linear": "down"}
        for stem, side in stems.items():
            for part in (*_PARTS, _SHAPE):
                for name in _names(stem, part):
                    if name in tensors:
                        made = (
                            {}
                            if part == _SHAPE
                            else dict(_split(name, part, path, side, shape, tensors[name]))
                        )
                        tensors.split(name, made)


def _names(stem: str, part: str) -> tuple[str, ...]:
    short = (stem + part.removeprefix("weight"),) if part.startswith("weight") else ()
    return (f"{stem}.{part}", f"{stem}_{part}", *short)


def _split(
    name: str, part: str, path: str, side: str, shape: ExpertsShape, stored: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    outputs, inputs = (2 * shape.inner, shape.hidden) if side == "both" else (shape.hidden, shape.inner)
    transposed = part == "weight" and shape.transposed and stored.dtype.is_floating_point
    words = part == _ZERO_POINTS and stored.dtype == torch.int32
    per_row = _OUTPUTS_PER_WORD if words else 1
    rows, dimensions = -(-outputs // per_row), {"bias": 2, _BLOCKS: 4}.get(part, 3)
    found = stored.shape[1 + transposed : 2 + transposed]
    if (
        part in _SCALES
        and len(stored.shape) == 3
        and found != (rows,)
        and _whole_blocks(side, shape, found[0])
    ):
        rows = found[0]
    fits = len(stored.shape) == dimensions and stored.shape[0] == shape.experts and found == (rows,)
    halves = side == "both" and per_row > 1  # a word must belong to gate or to up
    if not fits or (halves and (shape.interleaved or shape.inner % per_row)):
        wanted = [shape.experts, rows, *([] if part == "bias" else ["..."])]
        if part == "weight":
            wanted = [shape.experts, *((inputs, outputs) if transposed else (outputs, inputs))]
        raise CheckpointError(
            "the stacked tensor of experts does not fit the model",
            where=name,
            found=f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}",
            accepted=str(wanted).replace("'", "") + (", gate's words before up's" if words else ""),
            advice="config.json and the weights are of different models, or the file is damaged",
        )
    size = stored.size // shape.experts
    for expert in range(shape.experts):
        whole = replace(stored, shape=stored.shape[1:], start=stored.start + expert * size, size=size)
        if side == "down":
            yield f"{path}.{expert}.down_proj.{part}", _rows(whole, 0, 1, rows, transposed)
            continue
        step, second = (2, 1) if shape.interleaved else (1, rows // 2)
        yield f"{path}.{expert}.gate_proj.{part}", _rows(whole, 0, step, rows // 2, transposed)
        yield f"{path}.{expert}.up_proj.{part}", _rows(whole, second, step, rows // 2, transposed)


def _whole_blocks(side: str, shape: ExpertsShape, rows: int) -> bool:
    """Whether `rows` of scales, each of a block of outputs, fall apart into gate's and up's."""
    if side == "down":
        return 0 < rows < shape.hidden
    return rows > 0 and rows % 2 == 0 and shape.inner % (rows // 2) == 0 and not shape.interleaved


def _rows(whole: StoredTensor, first: int, step: int, count: int, transposed: bool) -> StoredTensor:
    if step == 1 and not transposed:  # they lie together
        size = whole.size // whole.shape[0]
        start, shape = whole.start + first * size, (count, *whole.shape[1:])
        return replace(whole, shape=shape, start=start, size=count * size)
    rest = whole.shape[:1] if transposed else whole.shape[1:]
    size = whole.size // whole.shape[1 if transposed else 0] * count
    return _Part(whole.path, whole.dtype, (count, *rest), whole.start, size, whole, first, step, transposed)
