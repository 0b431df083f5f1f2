"""Runs iree-compile: cached by content, with its diagnostics as our errors and a folder to repeat a failure in."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import filelock

from halfbyte.errors import CompilerError
from halfbyte.lowering.cache import cache_folder, keep

_KEPT_LINES = 40


def compile_module(
    text: str, flags: Sequence[str], *, dump_dir: Path | None = None, cache: bool = True, host: str = ""
) -> tuple[bytes, bool]:
    """Compiles MLIR text to a .vmfb; returns it and whether it came from the cache.

    Args:
        text: the module.
        flags: for iree-compile, without input and output.
        dump_dir: where to keep the module and the command; on failure they are kept there or in a new
            temporary folder, which the error names.
        cache: look the program up by the content of the module, the flags, the compiler's version and the host.
        host: what ``host`` in the flags stands for, part of the cache's key.

    Raises:
        CompilerError: with the diagnostics of iree-compile.

    $HALFBYTE_IREE_FLAGS holds more flags for every compilation, parted as a shell does.
    """
    flags = [*flags, *shlex.split(os.environ.get("HALFBYTE_IREE_FLAGS", ""))]
    if dump_dir is not None:
        _dump(dump_dir, text, flags)
    if not cache:
        return _run(text, flags, dump_dir), False
    parts = [version("iree-base-compiler"), host, *flags, text]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{key}.vmfb"
    with filelock.FileLock(folder / f"{key}.lock"):
        if kept.is_file():
            return kept.read_bytes(), True
        program = _run(text, flags, dump_dir)
        keep(kept, program)
        return program, False


def _executable() -> str:
    import iree.compiler

    tool = Path(iree.compiler.__file__).parent / "_mlir_libs" / "iree-compile"
    if not tool.is_file():
        raise CompilerError(
            "iree-compile is missing", where=str(tool), advice='pip install "halfbyte[compile]"'
        )
    return str(tool)


def _run(text: str, flags: Sequence[str], dump_dir: Path | None) -> bytes:
    with tempfile.TemporaryDirectory(prefix="halfbyte-") as folder:
        source, output = Path(folder) / "module.mlir", Path(folder) / "module.vmfb"
        source.write_text(text)
        command = [_executable(), str(source), *flags, "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise CompilerError("iree-compile cannot be run", found=str(error)) from error
        if done.returncode == 0 and output.is_file():
            return output.read_bytes()
        where = dump_dir or Path(tempfile.mkdtemp(prefix="halfbyte-failed-"))
        _dump(where, text, flags)
        (where / "diagnostics.txt").write_text(done.stderr)
        raise CompilerError(
            f"iree-compile failed with exit status {done.returncode}",
            found=_first_lines(done.stderr, str(source)),
            advice=f"the module, the command and all diagnostics are in {where}",
        )


def _first_lines(diagnostics: str, source: str) -> str:
    lines = [line.replace(source, "module.mlir") for line in diagnostics.splitlines()]
    telling = [line for line in lines if "error:" in line or "note:" in line or "LLVM ERROR" in line]
    return "\n    ".join(line[:400] for line in (telling or lines)[:_KEPT_LINES]) or "no diagnostics"


def _dump(folder: Path, text: str, flags: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "module.mlir").write_text(text)
    command = shlex.join(["iree-compile", "module.mlir", *flags, "-o", "module.vmfb"])
    (folder / "compile.sh").write_text(f'#!/bin/sh\ncd "$(dirname "$0")" && exec {command}\n')
