"""The runtime stands on iree.runtime, numpy and the standard library alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np

import halfbyte.runtime

SOURCES = sorted(Path(halfbyte.runtime.__file__).parent.glob("*.py"))
ALLOWED = {"numpy", "iree.runtime", "halfbyte.errors", "halfbyte.runtime"}
# Inside functions only: what a deployment may not have, and what comes with iree.runtime.
LAZY = {"tokenizers", "jinja2", "ml_dtypes"}


def _imported(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names.append(("." * node.level) + (node.module or ""))
    return names


def _allowed(name: str, among: set[str]) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names or any(
        name == prefix or name.startswith(prefix + ".") for prefix in among
    )


def _typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_sources_import_nothing_else() -> None:
    assert len(SOURCES) > 15
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for name in _imported(tree):
            assert _allowed(name, ALLOWED | LAZY), f"{path.name} imports {name}"
        for node in tree.body:
            if not _typing_only(node) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                for name in _imported(node):
                    assert _allowed(name, ALLOWED), f"{path.name} imports {name} at import time"


FORBIDDEN = (
    *(
        "torch",
        "torch_mlir",
        "transformers",
        "iree.compiler",
        "tokenizers",
        "jinja2",
        "typer",
        "rich",
        "click",
    ),
    *("pydantic", "safetensors", "gguf", "filelock", "psutil", "platformdirs", "huggingface_hub"),
    *("halfbyte.passes", "halfbyte.lowering", "halfbyte.checkpoints", "halfbyte.cli"),
)


def test_runs_where_nothing_else_can_be_imported(decoder_bundle: Path) -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == other or name.startswith(other + ".") for other in {FORBIDDEN!r}):
            raise AssertionError(f"imports {{name}}")
sys.meta_path.insert(0, Refuse())
import numpy as np
from halfbyte.runtime import Conversation, devices, generate, load
bundle = load(sys.argv[1])
print(bundle.call("forward", np.array([1, 2]))[0].shape, list(generate(bundle, [1, 2], max_tokens=2)) != [])
print(devices() != [], Conversation(bundle).step(1).shape)
"""
    command = [sys.executable, "-c", code, str(decoder_bundle)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{(2, 11)} True\nTrue {np.zeros(11).shape}\n"
