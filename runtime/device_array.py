"""Arrays that live on a device, and the way to and from numpy."""

from __future__ import annotations

from typing import Any

import iree.runtime as rt
import numpy as np

from halfbyte.errors import UsageError
from halfbyte.runtime.element_types import ELEMENT_TYPES, ElementType
from halfbyte.runtime.polling_threads import awake


class DeviceArray:
    """An array on a device: a result, or a cache that calls update in place.

    Attributes:
        shape: sizes of the dimensions.
        dtype: element type as in MLIR, e.g. ``f32``, ``bf16``.
        view: IREE's buffer view.
    """

    def __init__(self, device: rt.HalDevice, view: rt.HalBufferView, dtype: str) -> None:
        # The view before the device: they are released in this order, and IREE crashes on a buffer that
        # outlives its device.
        self.view = view
        self._device = device
        self.dtype = dtype
        self.shape: tuple[int, ...] = tuple(view.shape)

    @staticmethod
    def from_numpy(device: rt.HalDevice, array: np.ndarray[Any, Any], dtype: str) -> DeviceArray:
        """Copies a numpy array to a device.

        Args:
            device: where to.
            array: any shape, of the element type's carrier dtype.
            dtype: element type as in MLIR.
        """
        element = ELEMENT_TYPES[dtype]
        with awake():
            view = device.allocator.allocate_buffer_copy(
                memory_type=rt.MemoryType.DEVICE_LOCAL,
                allowed_usage=rt.BufferUsage.DEFAULT,
                device=device,
                buffer=np.ascontiguousarray(array, dtype=element.carrier).reshape(array.shape),
                element_type=getattr(rt.HalElementType, element.hal_name),
            )
        return DeviceArray(device, view, dtype)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns a copy on the host, of the carrier dtype (raw bits for bf16 and 8-bit floats)."""
        element = ELEMENT_TYPES[self.dtype]
        view = self.view
        if element.bits_only:  # for numpy's sake: the same bytes seen as unsigned integers
            integers = rt.HalElementType.UINT_16 if element.bytes == 2 else rt.HalElementType.UINT_8
            view = rt.HalBufferView(view.get_buffer(), list(self.shape), integers)
        return np.array(_host_values(self._device, view), dtype=element.carrier)

    def __repr__(self) -> str:
        return f"DeviceArray({'x'.join([*map(str, self.shape), self.dtype])})"


def _host_values(device: rt.HalDevice, view: rt.HalBufferView) -> np.ndarray[Any, Any]:
    """The array's values, in memory that may be the device's own.

    `rt.DeviceArray.to_host` of a buffer that cannot be mapped imports the result's memory into the driver, which
    Vulkan refuses for an address that is no multiple of a page (IREE 3.13). A buffer for the host has none of that.
    """
    buffer = view.get_buffer()
    dtype = rt.HalElementType.map_to_dtype(view.element_type)
    visible = buffer.memory_type() & int(rt.MemoryType.HOST_VISIBLE)
    if visible and buffer.allowed_usage() & int(rt.BufferUsage.MAPPING_SCOPED):
        return rt.DeviceArray(device, view).to_host()
    if not buffer.byte_length():
        return np.empty(view.shape, dtype)
    staging = device.allocator.allocate_buffer(
        memory_type=int(rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE),
        allowed_usage=int(rt.BufferUsage.TRANSFER_TARGET | rt.BufferUsage.MAPPING_SCOPED),
        allocation_size=buffer.byte_length(),
    )
    semaphore = device.create_semaphore(0)
    done = rt.HalFence.create_at(semaphore, 1)
    with awake():
        device.queue_copy(buffer, staging, rt.HalFence.create_at(semaphore, 0), done)
        done.wait()
    return staging.map().asarray(view.shape, dtype)


def as_carrier(array: Any, element: ElementType, where: str) -> np.ndarray[Any, Any]:
    """Returns a numpy array of the carrier dtype, without converting values.

    Args:
        array: a numpy array of that dtype, or of ml_dtypes' type of the same name (bfloat16, float8_*).
        element: the element type wanted.
        where: the argument's name, for the message.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(array, (np.ndarray, np.generic)):
        raise UsageError(
            "not an array", where=where, found=type(array).__name__, accepted="numpy arrays and DeviceArray"
        )
    array = np.asarray(array)
    if array.dtype not in (element.carrier, element.values):
        accepted = f"numpy.{element.carrier}" + (f" with the bits of {element.name}" * element.bits_only)
        raise UsageError("wrong element type", where=where, found=f"numpy.{array.dtype}", accepted=accepted)
    return array.view(element.carrier)


def as_float32(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns an array of floats as float32; exact for all types but f64.

    Args:
        array: of the carrier dtype of ``dtype``.
        dtype: element type as in MLIR.
    """
    return array.view(ELEMENT_TYPES[dtype].values).astype(np.float32, copy=False)
