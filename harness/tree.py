"""The source of Python packages as a list of files and one digest; the same on the sending and the receiving side.

Standard library only: the far interpreter runs this to say what it really has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def source_files(packages: Mapping[str, Path]) -> dict[str, Path]:
    """Every file of the packages by its path relative to the folder that holds them ("harness/tree.py"), sorted.

    Args:
        packages: import name -> the package's folder, or the one file of a module.

    Compiled code and hidden files aren't source, and are left out.

    Raises:
        FileNotFoundError: a package is neither a folder nor a file.
    """
    found = {}
    for name, root in packages.items():
        if root.is_file():
            found[f"{name}{root.suffix}"] = root
            continue
        if not root.is_dir():
            raise FileNotFoundError(f"{root}: the source of {name} is not there")
        for path in root.rglob("*"):
            inner = path.relative_to(root)
            if path.is_file() and not any(
                part == "__pycache__" or part.startswith(".") for part in inner.parts
            ):
                found[f"{name}/{inner.as_posix()}"] = path
    return {name: path for name, path in sorted(found.items()) if path.suffix != ".pyc"}


def digest(files: Mapping[str, Path]) -> str:
    """64 hexadecimal digits that stand for the names and the contents of `files`."""
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        encoded = name.encode()
        total.update(len(encoded).to_bytes(8, "big") + encoded)
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def folder_digest(folder: Path) -> str:
    """The digest of all packages and modules that lie in `folder`."""
    found = [
        path for path in folder.iterdir() if path.name != "__pycache__" and not path.name.startswith(".")
    ]
    return digest(source_files({path.stem if path.is_file() else path.name: path for path in found}))
