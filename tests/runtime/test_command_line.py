"""The command line as a process: help, exit codes, pipes, signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _halfbyte(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "halfbyte.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8", **options)


def test_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'iree', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "sys.argv = ['halfbyte', '--help']\n"
        "from halfbyte.cli import main; main()\n"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    for command in ("generate", "run", "logits", "devices", "version"):
        assert command in result.stdout
    assert time.monotonic() - start < 5


def test_says_what_the_command_line_needs() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "sys.argv = ['halfbyte', 'version']\n"
        "from halfbyte.cli import main; main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "the command line needs typer\n  do: pip install typer rich\n"


def test_version() -> None:
    found = json.loads(_halfbyte("version", "--json").stdout)
    assert found["python"].split(".")[0] == "3"
    assert {"halfbyte", "iree-base-runtime", "iree-base-compiler", "torch", "numpy"} <= found.keys()
    assert found["numpy"] == np.__version__
    assert "numpy" in _halfbyte("version").stdout
    assert _halfbyte("--version").stdout.startswith("halfbyte ")


def test_devices() -> None:
    assert "local-task" in _halfbyte("devices").stdout
    found = json.loads(_halfbyte("devices", "--json").stdout)
    assert {device["spec"] for device in found["devices"]} >= {"local-task", "local-sync"}
    assert found["cpu"]["architecture"]


def test_exit_codes(decoder_bundle: Path, graph_bundle: Path, copied_bundle: Path, tmp_path: Path) -> None:
    (copied_bundle / "model.n64k8.irpa").unlink()
    cases = {
        2: ("run", graph_bundle),
        3: ("run", copied_bundle, "--function=forward", "--input=1xi64"),
        6: ("run", graph_bundle, "--function=refuse", "--input=2xi32=-1"),
        0: ("run", graph_bundle, "--function=refuse", "--input=2xi32=1"),
    }
    for code, arguments in cases.items():
        result = _halfbyte(*arguments)
        assert result.returncode == code, result.stderr
        assert result.stderr.startswith("error: ") == (code != 0)
        assert "Traceback" not in result.stderr
    for arguments in (("nonsense",), ("run",), ("logits", decoder_bundle), ("run", decoder_bundle, "--what")):
        result = _halfbyte(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
    unknown = _halfbyte("run", graph_bundle, "--device=toaster")
    assert unknown.returncode == 6
    assert "accepted: cpu, local-task" in unknown.stderr


def test_readers_that_go_away_and_terminals_without_utf8(graph_bundle: Path) -> None:
    command = [sys.executable, "-m", "halfbyte.cli"]
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["run", str(graph_bundle), "--function=scalar", "--input=1", "--input=1"]
    result = subprocess.run(
        [*command, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    ascii_only = subprocess.run([*command, "run", "日本"], capture_output=True, check=False, env=environment)
    assert ascii_only.returncode == 3
    assert b"not a halfbyte bundle" in ascii_only.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interrupted() -> None:
    code = (
        "import os, signal, halfbyte.cli as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever runs the tests may ignore it
        "def make_app():\n"
        "    import typer\n"
        "    app = typer.Typer()\n"
        "    @app.command()\n"
        "    def wait() -> None: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return app\n"
        "cli.make_app = make_app\n"
        "import sys; sys.argv = ['halfbyte']; cli.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 130
    assert "Traceback" not in result.stderr
