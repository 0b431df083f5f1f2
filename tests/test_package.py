"""The outside of the project: what a wheel holds, what is declared, what the README says."""

from __future__ import annotations

import ast
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import halfbyte

ROOT = Path(__file__).parent.parent
FOLDERS = ("passes", "checkpoints", "lowering", "runtime")
SUFFIXES = (".py", ".j2", ".json")


def project() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


def tracked() -> list[Path]:
    """Every file of the project, without what is built."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        names = done.stdout.splitlines() if done.returncode == 0 else []
    except OSError:
        names = []
    if not names:  # an archive of the sources, not a repository
        built = {".venv", "build", "dist", "__pycache__", ".git"}
        found = (path for path in ROOT.rglob("*") if not built & set(path.relative_to(ROOT).parts))
        names = [str(path.relative_to(ROOT)) for path in found]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("wheel")
    source = scratch / "source"
    source.mkdir()
    for name in ("halfbyte", *FOLDERS):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(scratch)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [found] = scratch.glob("*.whl")
    return found


def test_the_wheel_holds_real_files_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    names = {entry.filename for entry in entries}
    assert not [entry.filename for entry in entries if stat.S_ISLNK(entry.external_attr >> 16)]
    assert {name.split("/")[0] for name in names} == {
        "halfbyte",
        f"halfbyte-{halfbyte.__version__}.dist-info",
    }
    for folder in FOLDERS:
        wanted = {
            f"halfbyte/{path.relative_to(ROOT)}"
            for path in (ROOT / folder).rglob("*")
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts
        }
        assert len(wanted) > 5
        assert wanted - names == set()
    assert "halfbyte/py.typed" in names
    assert "halfbyte/runtime/manifest.schema.json" in names


def test_the_wheel_works_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import halfbyte.runtime, halfbyte.checkpoints, halfbyte.compile_model\n"
        "from halfbyte.lowering.kernels.codes import INT8\n"
        "from halfbyte.lowering.kernels.generator import Quantize\n"
        "print(halfbyte.__file__, 'executable' in Quantize('f32', INT8).text())"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(tmp_path / "site/halfbyte/__init__.py"), "True"], done.stderr


# ---------------------------------------------------------------- dependencies


# Import name -> distribution, where they differ.
_DISTRIBUTIONS = {
    "iree.runtime": "iree-base-runtime",
    "iree.compiler": "iree-base-compiler",
    "torch_mlir": "torch-mlir",
}


def _imports() -> Iterator[str]:
    for folder in ("halfbyte/cli", *FOLDERS, "halfbyte"):
        for path in sorted((ROOT / folder).glob("*.py" if folder == "halfbyte" else "**/*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    yield node.module or ""


def _distribution(module: str) -> str:
    parts = module.split(".")
    return _DISTRIBUTIONS.get(".".join(parts[:2]), _DISTRIBUTIONS.get(parts[0], parts[0]))


def _declared(*extras: str) -> set[str]:
    found = project()
    lists = [found["dependencies"], *(found["optional-dependencies"][extra] for extra in extras)]
    return {re.split(r"[<>=!~ ]", name)[0] for names in lists for name in names}


def test_what_is_imported_is_declared_and_the_reverse() -> None:
    ours = set(sys.stdlib_module_names) | {"halfbyte"}
    imported = {_distribution(name) for name in _imports() if name.split(".")[0] not in ours}
    assert imported == _declared("cli", "text", "compile")


def test_every_dependency_is_pinned_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pinned = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    assert None not in pinned
    names = [match[1].lower().replace("_", "-") for match in pinned if match]
    assert sorted(set(names)) == sorted(names)
    declared = _declared(*project()["optional-dependencies"])
    assert {name.lower().replace("_", "-") for name in declared} - set(names) == set()


# ---------------------------------------------------------------- what is written about it


def _documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _commands(text: str, program: str) -> list[str]:
    """Command lines of a program in code blocks, with continued lines joined."""
    blocks = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", text, re.S)).replace("\\\n", " ")
    return [line.split("#")[0] for line in blocks.splitlines() if line.startswith(program + " ")]


def test_the_commands_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in _documents():
        text = document.read_text()
        for target in re.findall(r"(?<![\w-])make ([a-z][a-z0-9-]*)", " ".join(re.findall(r"`[^`]*`", text))):
            assert re.search(rf"^{target}:", makefile, re.M), f"{document.name}: make {target}"
    assert {"demo", "test"} <= set(re.findall(r"^make ([a-z]+)", (ROOT / "README.md").read_text(), re.M))


def test_the_options_of_the_documents_exist() -> None:
    import typer.main

    from halfbyte.cli import make_app

    known = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    seen = 0
    for document in _documents():
        for line in _commands(document.read_text(), "halfbyte"):
            name = line.split()[1]
            assert name in known, f"{document.name}: {line}"
            options = {
                option
                for parameter in known[name].params
                for option in parameter.opts + parameter.secondary_opts
            }
            for option in re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", line):
                assert option in options, f"{document.name}: {line}"
            seen += 1
    assert seen >= 5


def test_links_lead_somewhere() -> None:
    for document in _documents():
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            assert "://" in target or (document.parent / target).exists(), f"{document.name}: {target}"


def test_one_version() -> None:
    assert project()["version"] == halfbyte.__version__
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert latest is not None and latest[1] == halfbyte.__version__


# Paths of one machine and hosts of package registries: the project depends on neither.
_FORBIDDEN = re.compile(
    r"(?<![\w./])/(?:root|home|work|opt|mnt|Users)/\w|\bpypi\.|python[h]osted|index-url[ =]\S*://"
)


def test_nothing_names_a_machine() -> None:
    files = tracked()
    assert len(files) > 100
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = _FORBIDDEN.search(text)
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]!r}"
