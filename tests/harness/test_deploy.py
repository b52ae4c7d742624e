"""The code on a host: exactly what was sent, once, in its own folder and nowhere else."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from harness.deploy import deploy, own_packages
from harness.errors import UsageError
from harness.remotefs import RemoteFileError, RemoteFiles
from harness.ssh import Connection
from harness.tree import digest, folder_digest, source_files
from tests.lab.sshd import Sshd, sshd

__all__ = ["sshd"]  # a fixture

AWKWARD = 'a work folder/it\'s "here" $(x)'


@pytest.fixture
def files(sshd: Sshd, tmp_path: Path) -> Iterator[RemoteFiles]:
    """A workdir with an awkward name on the lab's host, which shares its file system with this test."""
    with Connection.open(sshd.host()) as connection:
        yield RemoteFiles(connection, str(tmp_path / "host" / AWKWARD))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with code, data, a subpackage and what isn't source."""
    root = tmp_path / "source" / "thing"
    for name in (
        "__init__.py",
        "sub/__init__.py",
        "sub/it's data.txt",
        "__pycache__/x.pyc",
        ".hidden",
        "old.pyc",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_the_digest_stands_for_names_and_contents(package: Path) -> None:
    """It changes with a byte, a name or a new file, and not with compiled code or where the source lies."""
    first = digest(source_files({"thing": package}))
    (package / "__pycache__/y.pyc").write_text("new")
    moved = package.rename(package.with_name("moved"))
    assert digest(source_files({"thing": moved})) == first
    assert list(source_files({"thing": moved})) == [
        "thing/__init__.py",
        "thing/sub/__init__.py",
        "thing/sub/it's data.txt",
    ]
    seen = {first, digest(source_files({"other": moved}))}
    (moved / "__init__.py").write_text("changed")
    seen.add(digest(source_files({"thing": moved})))
    (moved / "__init__.py").rename(moved / "renamed.py")
    seen.add(digest(source_files({"thing": moved})))
    assert len(seen) == 4


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """Source that isn't there is an error with its path, not an empty package."""
    with pytest.raises(FileNotFoundError, match="nothing"):
        source_files({"thing": tmp_path / "nothing"})


def test_exactly_the_source_arrives(files: RemoteFiles, package: Path, tmp_path: Path) -> None:
    """Each file arrives whole in a folder named by its digest, private, and nothing else is left on the host."""
    module = tmp_path / "single.py"
    module.write_text("x = 1\n")
    deployed = deploy(files, {"thing": package, "single": module})
    there = Path(deployed.path)
    assert there.parent == tmp_path / "host" / AWKWARD / "code"
    assert deployed.digest.startswith(there.name)
    assert folder_digest(there) == deployed.digest
    found = sorted(str(path.relative_to(tmp_path / "host")) for path in (tmp_path / "host").rglob("*"))
    names = [
        "single.py",
        "thing",
        *(f"thing/{name}" for name in ("__init__.py", "sub", "sub/__init__.py", "sub/it's data.txt")),
    ]
    expected = [f"{AWKWARD}/code/{there.name}/{name}" for name in names]
    assert [path for path in found if there.name + "/" in path] == expected
    assert len(found) == len(expected) + 4  # and the folders that lead there
    for path in (tmp_path / "host").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_same_code_is_sent_once(files: RemoteFiles, package: Path) -> None:
    """A second deployment sends no file and touches none; changed code goes beside the old."""
    first = deploy(files, {"thing": package})
    times = {path: path.stat().st_mtime_ns for path in Path(first.path).rglob("*")}
    second = deploy(files, {"thing": package})
    assert (first.copied, second.copied) == (3, 0)
    assert second.path == first.path
    assert {path: path.stat().st_mtime_ns for path in Path(first.path).rglob("*")} == times
    (package / "__init__.py").write_text("changed")
    third = deploy(files, {"thing": package})
    assert third.path != first.path
    assert Path(first.path).is_dir()


def test_damaged_code_can_be_replaced(files: RemoteFiles, package: Path) -> None:
    """`replace` makes the folder what its name says, and leaves nothing of the old one."""
    deployed = deploy(files, {"thing": package})
    (Path(deployed.path) / "thing/__init__.py").write_text("damaged")
    again = deploy(files, {"thing": package}, replace=True)
    assert folder_digest(Path(again.path)) == deployed.digest
    assert os.listdir(Path(again.path).parent) == [again.path.name]


def test_two_at_once_do_no_harm(sshd: Sshd, package: Path, tmp_path: Path) -> None:
    """Deployments of the same code started together all end with the one folder and no rubble."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with Connection.open(sshd.host()) as connection:
                deploy(RemoteFiles(connection, str(tmp_path / "work")), {"thing": package})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert os.listdir(tmp_path / "work/code") == [digest(source_files({"thing": package}))[:16]]


def test_our_own_packages_are_whole() -> None:
    """What is brought to a host by default holds the agent's and the plan's code, and no test."""
    names = source_files(own_packages())
    assert {"harness/tree.py", "harness/remote.py", "sharding/__init__.py"} <= set(names)
    assert all(name.split("/")[0] in {"harness", "sharding"} for name in names)


@pytest.mark.parametrize("path", ["/etc/hosts", "{root}/../x", "{root}", "{root}-beside/x", "relative"])
def test_nothing_outside_the_workdir_is_touched(files: RemoteFiles, tmp_path: Path, path: str) -> None:
    """Every way to name a path outside is refused before anything is sent."""
    target = PurePosixPath(path.format(root=files.root))
    for action in (
        lambda: files.write(target, b"x"),
        lambda: files.put(Path(__file__), target),
        lambda: files.get(target, tmp_path / "got"),
        lambda: files.make_folder(target),
        lambda: files.remove_tree(target),
    ):
        with pytest.raises(ValueError, match="not inside the workdir"):
            action()
    assert not (tmp_path / "got").exists()


def test_removal_follows_no_link(files: RemoteFiles, tmp_path: Path) -> None:
    """A link inside a removed folder goes, what it points to stays; a folder behind a link isn't removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    inner = Path(files.root) / "job"
    inner.mkdir()
    (inner / "link").symlink_to(outside)
    files.remove_tree(PurePosixPath(inner))
    (Path(files.root) / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="not removed"):
        files.remove_tree(files.root / "link" / "outside")
    assert not inner.exists()
    assert (outside / "kept").exists()


def test_a_write_is_whole_or_nothing(files: RemoteFiles) -> None:
    """A file is replaced in one step with the mode asked for; one that can't be written leaves no rubble."""
    target = files.root / "a file"
    files.write(target, b"old")
    files.write(target, b"\x00new" * 100_000, mode=0o700)
    assert Path(target).read_bytes() == b"\x00new" * 100_000
    assert stat.S_IMODE(Path(target).stat().st_mode) == 0o700
    (Path(files.root) / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(RemoteFileError, match=r"lab: .*folder"):
        files.write(files.root / "folder", b"x")
    assert sorted(os.listdir(files.root)) == ["a file", "folder"]


def test_a_workdir_below_home_is_found(sshd: Sshd) -> None:
    """`~/` is the home folder of the user there; nothing is made for a folder that exists."""
    with Connection.open(sshd.host()) as connection:
        name = os.path.relpath(sshd.folder, Path.home())
        assert not name.startswith("~")
        files = RemoteFiles(connection, str(sshd.folder))
        assert files.home == PurePosixPath(Path.home())


@pytest.mark.parametrize("problem", ["file", "open"])
def test_a_workdir_that_can_not_be_used_is_refused(sshd: Sshd, tmp_path: Path, problem: str) -> None:
    """A file in its place, or a folder that everybody may write to, is refused with its name and the remedy."""
    work = tmp_path / "work"
    if problem == "file":
        work.touch()
        work = work / "below"
    else:
        work.mkdir()
        work.chmod(0o777)
    with Connection.open(sshd.host()) as connection, pytest.raises(UsageError, match="workdir") as caught:
        RemoteFiles(connection, str(work))
    assert str(work) in str(caught.value)
    assert "\n" not in str(caught.value)
