"""Bring the code of this working tree to a host: by content, once, into `<workdir>/code/<digest>/` and nowhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.remotefs import RemoteFileError, RemoteFiles
from harness.tree import digest, source_files

SHORT = 16  # digits of the digest in the folder's name


def own_packages() -> dict[str, Path]:
    """The packages that a job needs, where this process has them from."""
    found = {"harness": Path(__file__).parent}
    spec = importlib.util.find_spec("sharding")  # found, not imported: that would load mlx
    assert spec is not None
    assert spec.submodule_search_locations
    return {**found, "sharding": Path(spec.submodule_search_locations[0])}


@dataclass(frozen=True)
class Deployed:
    """The code as it lies on a host."""

    path: PurePosixPath  # goes into PYTHONPATH
    digest: str  # of what was sent
    copied: int  # files sent this time


def deploy(
    files: RemoteFiles, packages: Mapping[str, Path] | None = None, *, replace: bool = False
) -> Deployed:
    """Make sure the host has exactly these packages.

    The folder's name is the digest of what is in it, and it appears whole: when it is there, nothing is sent. Two
    controllers at once do no harm; the second finds the folder and drops its copy.

    Args:
        files: the host's workdir.
        packages: import name -> folder or file; `sharding` and `harness` unless given.
        replace: send it again even so, because what lies there turned out to be damaged.

    Raises:
        Unreachable: the host was lost.
        RemoteFileError: it can't keep the files (a full disk, for one).
    """
    sources = source_files(own_packages() if packages is None else packages)
    total = digest(sources)
    code = files.root / "code"
    target = code / total[:SHORT]
    if replace:
        _drop(files, target)
    elif files.exists(target):
        return Deployed(target, total, copied=0)
    temporary = code / f".{total[:SHORT]}.{secrets.token_hex(4)}"
    try:
        for folder in sorted({(temporary / name).parent for name in sources}):
            files.make_folder(folder)
        for name, source in sources.items():
            files.put(source, temporary / name)
        try:
            files.rename(temporary, target)
        except RemoteFileError:
            if not files.exists(target):
                raise
            files.remove_tree(temporary)
            return Deployed(target, total, copied=0)
    except OSError:
        with contextlib.suppress(OSError):
            files.remove_tree(temporary)
        raise
    return Deployed(target, total, copied=len(sources))


def _drop(files: RemoteFiles, target: PurePosixPath) -> None:
    """Out of the way in one step, then removed at leisure."""
    aside = target.with_name(f".old.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        files.rename(target, aside)
        files.remove_tree(aside)
