"""One function of a loaded program, called with device arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import iree.runtime as rt
import numpy as np

from halfbyte.errors import CheckpointError, DeviceError
from halfbyte.runtime.device import Device
from halfbyte.runtime.device_array import DeviceArray
from halfbyte.runtime.element_types import ELEMENT_TYPES
from halfbyte.runtime.iree_messages import IREE_ERRORS, one_line
from halfbyte.runtime.manifest import EntryPoint

_TYPE = re.compile(r"%\w+: ([^\s,)]+)")


class Function:
    """A function of a program.

    IREE's own `FunctionInvoker` is not used, for it cannot return bf16 or 8-bit floats.

    Args:
        context: holds the program and the modules it needs.
        module: the program.
        device: where it runs.
        name: the function's name.
        entry: its signature by the manifest.

    Raises:
        CheckpointError: the program has no such function, or one with another number of arguments.
    """

    def __init__(
        self, context: rt.VmContext, module: rt.VmModule, device: Device, name: str, entry: EntryPoint
    ) -> None:
        function = module.lookup_function(name)
        if function is None:
            have = ", ".join(n for n in module.function_names if not n.startswith("__"))
            raise CheckpointError("the program lacks an entry point of the manifest", where=name, found=have)
        # e.g. sync func @f(%input0: tensor<?xi64>, %input1: i64) -> (%output0: tensor<4xf32>)
        takes, _, gives = function.reflection.get("iree.abi.declaration", "").partition(" -> ")
        types = _TYPE.findall(takes)
        for what, found, wanted in (
            ("inputs", types, entry.inputs),
            ("outputs", _TYPE.findall(gives), entry.outputs),
        ):
            if takes and len(found) != len(wanted):
                raise CheckpointError(
                    f"program and manifest disagree on the number of {what}",
                    where=name,
                    found=f"{len(found)} in the program, {len(wanted)} in the manifest",
                    advice="compile the model again",
                )
        # Scalars in the program are arrays of no dimensions to callers.
        self._scalars = [bool(re.fullmatch(r"[a-z]+\d+", kind)) for kind in types] or [False] * len(
            entry.inputs
        )
        self._context, self._function = context, function
        self._opened, self._device = device, device.hal
        self.name, self.entry = name, entry

    def __call__(self, inputs: Sequence[DeviceArray | np.ndarray[Any, Any]]) -> list[DeviceArray]:
        """Runs the function and waits for it.

        Args:
            inputs: one per input of the entry point, of its shape and dtype; numpy arrays are copied.

        Returns:
            One array per output.

        Raises:
            DeviceError: the device failed.
        """
        if self._opened.driver == "vulkan" and (empty := self._empty_results(inputs)) is not None:
            return empty
        arguments = rt.VmVariantList(len(inputs))
        results = rt.VmVariantList(len(self.entry.outputs))
        try:
            for value, tensor, scalar in zip(inputs, self.entry.inputs, self._scalars, strict=True):
                if scalar:
                    host = value.numpy() if isinstance(value, DeviceArray) else value
                    push = arguments.push_float if host.dtype.kind == "f" else arguments.push_int
                    push(host.item())
                    continue
                if not isinstance(value, DeviceArray):
                    value = DeviceArray.from_numpy(self._device, value, tensor.dtype)
                arguments.push_ref(value.view.ref)
            self._opened.call(lambda: self._context.invoke(self._function, arguments, results))
        except IREE_ERRORS as error:
            raise DeviceError("the call failed", where=self.name, found=one_line(error)) from None
        return [self._result(results, index, tensor.dtype) for index, tensor in enumerate(self.entry.outputs)]

    def _empty_results(
        self, inputs: Sequence[DeviceArray | np.ndarray[Any, Any]]
    ) -> list[DeviceArray] | None:
        """The results of a call that has none to compute: IREE's Vulkan driver takes no empty buffers."""
        sizes: dict[int | str, int] = {}
        for value, tensor in zip(inputs, self.entry.inputs, strict=True):
            sizes |= dict(zip(tensor.shape, value.shape, strict=True))
        shapes = [
            [size if isinstance(size, int) else sizes.get(size, 1) for size in tensor.shape]
            for tensor in self.entry.outputs
        ]
        if 0 not in sizes.values() or not all(0 in shape for shape in shapes):
            return None
        return [
            DeviceArray.from_numpy(
                self._device, np.empty(shape, ELEMENT_TYPES[tensor.dtype].carrier), tensor.dtype
            )
            for shape, tensor in zip(shapes, self.entry.outputs, strict=True)
        ]

    def _result(self, results: rt.VmVariantList, index: int, dtype: str) -> DeviceArray:
        value = results.get_variant(index)
        if isinstance(value, (int, float)):
            array = np.array(value, dtype=ELEMENT_TYPES[dtype].carrier)
            return DeviceArray.from_numpy(self._device, array, dtype)
        return DeviceArray(self._device, results.get_as_object(index, rt.HalBufferView), dtype)
