"""What the interpreter of a host is and has. `harness.remote` feeds this file to that interpreter's stdin:

    python - MARK mlx.core,mlx_lm /folder/of/the/code  < harness/probe.py

It prints one line, MARK and a JSON object: `version`, `missing` (modules that can't be found), `digest` of the code
folder, `packages` (versions), `memory` (bytes). Standard library only, and nothing that an old Python 3 can't even parse: that the
interpreter is too old is one of its answers.
"""

import json
import os
import sys

PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "transformers")


def facts(needed: "list[str]", folder: str) -> "dict[str, object]":
    """What this interpreter can import, found without importing it; `digest` is None when the code is damaged."""
    from importlib import metadata, util
    from pathlib import Path

    missing = []
    for name in needed:
        try:
            spec = util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            missing.append(name)
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        from harness.tree import folder_digest

        digest = folder_digest(Path(folder))
    except Exception:  # whatever damaged source raises
        digest = None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"missing": missing, "packages": versions, "digest": digest, "memory": memory}


def main(mark: str, needed: str, folder: str) -> None:
    """Print the answer."""
    version = list(sys.version_info[:3])
    known = facts(needed.split(","), folder) if version >= [3, 11] else {}
    print("\n" + mark + json.dumps({"version": version, "missing": [], "digest": None, **known}))


if __name__ == "__main__":
    main(*sys.argv[1:])
