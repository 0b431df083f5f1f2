"""Loads a bundle and runs it. Needs iree-base-runtime and numpy; imports neither torch nor the compiler."""

from halfbyte.runtime.bundle import Bundle, load
from halfbyte.runtime.conversation import Conversation
from halfbyte.runtime.device import devices
from halfbyte.runtime.device_array import DeviceArray
from halfbyte.runtime.generate import Generation, Timing, generate
from halfbyte.runtime.manifest import Manifest
from halfbyte.runtime.tokenizer import Tokenizer

__all__ = [
    "Bundle",
    "Conversation",
    "DeviceArray",
    "Generation",
    "Manifest",
    "Timing",
    "Tokenizer",
    "devices",
    "generate",
    "load",
]
