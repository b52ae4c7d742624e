"""The kernels that MLX's CPU backend compiles at run time, kept from one job to the next and never shared half-written.

MLX compiles a fused function with the system's C++ compiler and keeps the library in `<TMPDIR>/mlx/<version>/cpu`.
It takes any library it finds there, so two ranks that compile the same function at once can load half of one; and a
fresh TMPDIR for each job means half a minute of compiling in each. So every rank gets a folder of its own, filled with
links to what earlier ranks compiled, and what a rank that ended well adds is linked back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from harness import protocol

KERNELS = "mlx"
"""What MLX calls its folder in TMPDIR."""


def store() -> Path:
    """Where kernels are kept between jobs: this user's alone, since a rank runs what lies there.

    Raises:
        PermissionError: Somebody else could write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = protocol.private_folder(Path(base).absolute() / "shardbench")
    return protocol.private_folder(root / "kernels")


def lend(folder: Path) -> None:
    """Fill a rank's own TMPDIR with the kernels there are; without a usable store it starts empty."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        _link_tree(store(), folder / KERNELS)


def give_back(folder: Path) -> None:
    """Keep what a rank that ended well has compiled."""
    with contextlib.suppress(OSError):
        _link_tree(folder / KERNELS, store())


def _link_tree(source: Path, target: Path) -> None:
    """Make every file below `source` appear below `target`, whole; what is there already stays."""
    for path in source.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        copy = target / path.relative_to(source)
        if copy.exists():
            continue
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.link(path, copy)
        except FileExistsError:
            continue  # another rank was faster
        except OSError:  # another file system
            partial = copy.with_name(f".{copy.name}.{os.getpid()}")
            shutil.copy2(path, partial)
            os.replace(partial, copy)
