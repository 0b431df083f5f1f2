"""NVIDIA's assembler over the PTX that a compilation leaves, and what is in the PTX."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@functools.cache
def assembler() -> Path | None:
    """ptxas of the package nvidia-cuda-nvcc, or one on the PATH."""
    try:
        for file in metadata.files("nvidia-cuda-nvcc") or ():
            if file.name == "ptxas":
                return Path(str(file.locate()))
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which("ptxas")
    return Path(found) if found else None


@dataclass(frozen=True)
class Entry:
    """A kernel of a PTX file: its text, and the registers and bytes of spills that the assembler gives it."""

    text: str
    registers: int
    spilled: int

    def count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{re.escape(instruction)}", self.text))


def assembled(folder: Path, architecture: str, scratch: Path) -> dict[str, Entry]:
    """The kernels of all PTX files in a folder, by name; the assembler has accepted each.

    Raises:
        AssertionError: with the assembler's message.
    """
    tool = assembler()
    assert tool is not None
    out: dict[str, Entry] = {}
    for file in sorted(folder.glob("*.ptx")):
        text = file.read_text()
        command = [tool, f"-arch={architecture}", "-v", file, "-o", scratch / "assembled.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
        bodies = {
            part.split("(", 1)[0].strip(): part
            for part in re.split(r"^\.visible \.entry ", text, flags=re.M)[1:]
        }
        for name, spilled, registers in re.findall(
            r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
            done.stderr,
            re.DOTALL,
        ):
            out[name] = Entry(bodies[name], int(registers), int(spilled))
    return out
