"""The command line: one file per command. Heavy imports are inside the commands, so that --help is quick."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from typing import TYPE_CHECKING

from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    import typer

# transformers imports torchao where it is installed, which then tells of its own internals: nothing to act on.
_TALKATIVE = ("torchao", "torch.utils._pytree")
# In the order of --help. A command is the function NAME_command in the module of its name.
COMMANDS = ("inspect", "compile", "generate", "bench", "run", "logits", "verify", "devices", "version")


def make_app() -> typer.Typer:
    """Returns the application; a command whose module is not part of this installation is left out."""
    import typer

    app = typer.Typer(
        name="halfbyte",
        help="Compiles PyTorch models with int4-quantized linear layers into portable IREE programs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from halfbyte.cli.version import versions

            typer.echo(f"halfbyte {versions()['halfbyte'] or '(not installed)'}")
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        pass

    for name in COMMANDS:
        module_name = f"{__name__}.{name}"
        if importlib.util.find_spec(module_name) is not None:
            module = importlib.import_module(module_name)
            app.command(name)(getattr(module, f"{name}_command"))
    return app


def main() -> None:
    """Runs the command line and exits.

    Exit codes: 0 ok, 1 a comparison failed, 2 usage, 3 checkpoint, 4 unsupported layer, 5 compiler, 6 device,
    130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(
            stream, "reconfigure"
        ):  # text a model writes must not kill a terminal that lacks a character
            stream.reconfigure(errors="replace")
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        code = _run()
    except BrokenPipeError:
        code = _close_pipe()
    sys.exit(code)


def _run() -> int:
    try:
        app = make_app()
        app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"the command line needs {error.name}\n  do: pip install typer rich", file=sys.stderr)
        return 1
    except HalfbyteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        sys.stdout.flush()
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _close_pipe() -> int:
    """Whoever read our output has gone: no complaint, and none from the interpreter's last flush either."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
