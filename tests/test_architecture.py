"""The shape of the sources: which way imports point, how large files are and what they are called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folder -> the modules of halfbyte that its files may import, with all that is below them.
ALLOWED = {
    "passes": ("halfbyte.passes", "halfbyte.errors"),
    "checkpoints": ("halfbyte.checkpoints", "halfbyte.passes", "halfbyte.errors"),
    "lowering": (
        "halfbyte.lowering",
        "halfbyte.passes",
        "halfbyte.errors",
        "halfbyte.runtime.manifest",
        "halfbyte.runtime.cpu_features",
    ),
    "runtime": ("halfbyte.runtime", "halfbyte.errors"),
}


def sources(folder: str) -> list[Path]:
    found = sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
    assert found
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module named by an import statement, wherever it stands; names imported from packages too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            yield module
            if module in ("halfbyte", "halfbyte.runtime"):
                yield from (f"{module}.{alias.name}" for alias in node.names)


def below(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if below(name, ("halfbyte",)) and not below(name, ALLOWED[folder])
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["passes", "checkpoints"])
def test_what_knows_torch_knows_no_compiler(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if below(name, ("iree", "torch_mlir"))
    ]
    assert wrong == []


def test_only_the_command_line_imports_the_command_line() -> None:
    for folder in (*ALLOWED, "halfbyte"):
        for path in (ROOT / folder).glob("*.py"):
            for name in imports(path):
                assert not below(name, ("halfbyte.cli", "typer", "rich")), f"{path.name} imports {name}"


def files() -> list[Path]:
    folders = (*ALLOWED, "halfbyte/cli", "benchmarks", "tests")
    found = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    found |= set((ROOT / "halfbyte").glob("*.py"))
    kept = {".py", ".j2", ".mlir"}
    return sorted(path for path in found if path.suffix in kept and "__pycache__" not in path.parts)


def test_no_file_is_larger_than_twenty_kilobytes() -> None:
    assert len(files()) > 100
    assert [f"{path.relative_to(ROOT)}" for path in files() if path.stat().st_size > 20_000] == []


def test_files_are_named_by_what_is_in_them() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "lib", "core"}
    named = [path for path in files() if vague & set(path.name.split(".")[0].split("_"))]
    assert [str(path.relative_to(ROOT)) for path in named] == []
    folders = {part for path in files() for part in path.relative_to(ROOT).parts[:-1]}
    assert folders & vague == set()


def test_every_module_says_what_it_is() -> None:
    for path in files():
        if path.suffix == ".py" and path.read_text(encoding="utf-8").strip():
            text = path.read_text(encoding="utf-8")
            if path.name != "__main__.py":
                assert ast.get_docstring(ast.parse(text)), path.relative_to(ROOT)


def test_importing_halfbyte_is_cheap() -> None:
    """The package itself, and its errors, import nothing heavy; names are looked up when they are used."""
    for name in ("halfbyte/__init__.py", "halfbyte/errors.py"):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in ("torch", "numpy", "iree", "transformers")]
