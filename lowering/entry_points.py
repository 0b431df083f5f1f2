"""The signatures of a program's entry points, as the manifest tells them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.errors import UnsupportedLayerError
from halfbyte.lowering.importer import Imported, TensorType
from halfbyte.runtime.manifest import EntryPoint, Tensor

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "ui8",
    torch.bool: "i1",
}
_RESULTS = ("logits", "token")


def entry_points(imported: Imported, caches: Sequence[Tensor]) -> dict[str, EntryPoint]:
    """Names, shapes and dtypes of what each function takes and gives; a varying size is called T, then T1, T2, ...

    Args:
        imported: the program.
        caches: the last arguments of every function that takes more than tokens and a position.
    """
    out = {}
    for name, values in imported.values.items():
        sizes: dict[str, str] = {}
        inputs = [
            (label, value)
            for label, value, state in zip(imported.names[name], values, imported.state[name], strict=True)
            if state is None
        ]
        kept = list(caches) if len(inputs) > len(caches) > 0 else []
        own = inputs[: len(inputs) - len(kept)]
        results = imported.results[name]
        # A decoder's results have names; a graph's are numbered.
        labels = _RESULTS if caches else ()
        outputs = [
            _tensor(labels[i] if i < len(labels) else f"output{i}", value, sizes, name)
            for i, value in enumerate(results)
        ]
        tensors = [_tensor(label, value, sizes, name) for label, value in own]
        out[name] = EntryPoint((*tensors, *kept), tuple(outputs))
    return out


def _tensor(label: str, value: TensorType | None, sizes: dict[str, str], entry: str) -> Tensor:
    if value is None or value.dtype not in _DTYPES:
        raise UnsupportedLayerError(
            "only tensors can be arguments and results",
            where=f"{entry}, {label}",
            found="no tensor" if value is None else str(value.dtype),
            accepted=", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES),
        )
    shape: list[int | str] = []
    for size in value.shape:
        if isinstance(size, int):
            shape.append(size)
        else:
            shape.append(sizes.setdefault(size, "T" if not sizes else f"T{len(sizes)}"))
    return Tensor(label, tuple(shape), _DTYPES[value.dtype])
