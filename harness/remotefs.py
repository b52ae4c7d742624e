"""Files on a host, over SFTP, and only inside one folder there: the host's workdir."""

from __future__ import annotations

import contextlib
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import paramiko

from harness.errors import Unreachable, UsageError
from harness.ssh import Connection

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
CHUNK = 1 << 15  # what every server hands out at once
IN_FLIGHT = 64  # chunks asked for before the first has come


class RemoteFileError(Unreachable, OSError):
    """The host is there, but its file system refused: a full disk, a missing folder. One line that names host, path and
    reason. No case can be run on such a host, so it counts as unreachable."""


class RemoteFiles:
    """The host's workdir. Every path handed in must lie inside it, links resolved; anything else is a ValueError."""

    def __init__(self, connection: Connection, workdir: str) -> None:
        """Open the folder, making it (0700) when needed.

        Raises:
            Unreachable: the connection is gone.
            UsageError: the folder can't be made, isn't a folder, or others may write to it.
        """
        self._connection = connection
        self._lock = threading.Lock()  # paramiko's client is safe for one thread at a time
        with connection.guard():
            self._sftp = paramiko.SFTPClient.from_transport(connection.transport)
            assert self._sftp is not None  # None only for a transport in server mode
            channel = self._sftp.get_channel()
            assert channel is not None
            channel.settimeout(connection.timeouts.silence)
            self.home = PurePosixPath(self._sftp.normalize("."))
        path = PurePosixPath(workdir)
        if path.parts[:1] == ("~",):
            path = self.home.joinpath(*path.parts[1:])
        self.root = path  # until its links are resolved
        label = connection.to.label
        try:
            self._make(path)
            with self._remote(path) as sftp:
                self.root = PurePosixPath(sftp.normalize(str(path)))
                mode = sftp.stat(str(path)).st_mode or 0
        except RemoteFileError as error:
            raise UsageError(f"{error}; give another `workdir` in the cluster file") from None
        if not stat.S_ISDIR(mode) or mode & 0o022:
            raise UsageError(
                f"{label}: workdir {path} is not a folder that only {connection.to.user} can write to; "
                "chmod go-w it, or give another `workdir` in the cluster file"
            )

    def exists(self, path: PurePosixPath) -> bool:
        with self._remote(path) as sftp:
            try:
                sftp.lstat(str(path))
            except FileNotFoundError:
                return False
        return True

    def make_folder(self, path: PurePosixPath, *, fresh: bool = False) -> None:
        """Make a private folder, its parents too; `fresh`: FileExistsError when it is there already."""
        self._inside(path)
        if fresh:
            self._make(path.parent)
            if self.exists(path):
                raise FileExistsError(f"{self._connection.to.label}: {path} exists")
            with self._remote(path) as sftp:
                sftp.mkdir(str(path), PRIVATE_FOLDER)
        else:
            self._make(path)

    def put(self, source: Path, target: PurePosixPath) -> None:
        """Copy a local file, whole or not at all, mode 0600."""
        with source.open("rb") as file, self._replacing(target, PRIVATE_FILE) as (sftp, temporary):
            sftp.putfo(file, temporary, file_size=source.stat().st_size, confirm=True)

    def write(self, target: PurePosixPath, data: bytes, mode: int = PRIVATE_FILE) -> None:
        """Write a file, whole or not at all."""
        with self._replacing(target, mode) as (sftp, temporary), sftp.open(temporary, "wb") as file:
            file.set_pipelined(True)
            file.write(data)

    def get(self, source: PurePosixPath, target: Path) -> None:
        """Copy a file here, mode 0600; links are not followed (FileNotFoundError)."""
        self._inside(source)
        target.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with self._remote(source) as sftp:
            if not stat.S_ISREG(sftp.lstat(str(source)).st_mode or 0):
                raise FileNotFoundError(source)
            with sftp.open(str(source), "rb") as file, target.open("wb") as copy:
                # Up to the size it has now, and not to its end: a rank that got lost may write on for ever.
                left = file.stat().st_size or 0
                file.prefetch(left, max_concurrent_requests=IN_FLIGHT)
                while left > 0 and (chunk := file.read(min(left, CHUNK))):
                    copy.write(chunk)
                    left -= len(chunk)
        target.chmod(PRIVATE_FILE)

    def names(self, folder: PurePosixPath) -> dict[str, int]:
        """Name -> mode of each entry; names that would leave the folder are passed over."""
        with self._remote(folder) as sftp:
            entries = sftp.listdir_attr(str(folder))
        return {
            entry.filename: entry.st_mode or 0
            for entry in entries
            if entry.filename not in {"", ".", ".."} and not set("/\0") & set(entry.filename)
        }

    def rename(self, source: PurePosixPath, target: PurePosixPath) -> None:
        """Move a folder; OSError when `target` is a folder that isn't empty."""
        self._inside(source)
        self._inside(target)
        with self._remote(target) as sftp:
            sftp.posix_rename(str(source), str(target))

    def remove_tree(self, path: PurePosixPath) -> None:
        """Remove a folder and what is in it, following no link; no error when it is gone."""
        self._inside(path)
        with contextlib.suppress(FileNotFoundError), self._remote(path) as sftp:
            real = PurePosixPath(sftp.normalize(str(path)))
            if real != path:  # a link on the way would lead the removal elsewhere
                raise ValueError(f"{path}: is really {real}; not removed")
            self._remove(sftp, path)

    def _remove(self, sftp: paramiko.SFTPClient, folder: PurePosixPath) -> None:
        for entry in sftp.listdir_attr(str(folder)):
            inner = folder / entry.filename
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(entry.st_mode or 0):
                    self._remove(sftp, inner)
                else:
                    sftp.remove(str(inner))
        sftp.rmdir(str(folder))

    def _inside(self, path: PurePosixPath) -> None:
        if ".." in path.parts or "\0" in str(path) or self.root not in path.parents:
            raise ValueError(f"{path}: not inside the workdir {self.root}")

    def _make(self, path: PurePosixPath) -> None:
        """mkdir -p with private modes."""
        with self._remote(path) as sftp:
            missing = []
            for step in (path, *path.parents):
                try:
                    sftp.stat(str(step))
                    break
                except FileNotFoundError:
                    missing.append(step)
            for step in reversed(missing):
                try:
                    sftp.mkdir(str(step), PRIVATE_FOLDER)
                except OSError as error:
                    if not _is_folder(sftp, step):  # else another session was faster
                        reason = error.strerror or error
                        raise RemoteFileError(
                            f"{self._connection.to.label}: can't make {step}: {reason}"
                        ) from None

    @contextlib.contextmanager
    def _replacing(self, target: PurePosixPath, mode: int) -> Iterator[tuple[paramiko.SFTPClient, str]]:
        """A temporary name beside `target` that takes its place at the end."""
        self._inside(target)
        temporary = str(target.with_name(f".{secrets.token_hex(8)}"))
        with self._remote(target) as sftp:
            try:
                yield sftp, temporary
                sftp.chmod(temporary, mode)
                sftp.posix_rename(temporary, str(target))
            except BaseException as error:
                with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                    sftp.remove(temporary)
                if isinstance(error, FileNotFoundError):
                    label = self._connection.to.label
                    raise RemoteFileError(f"{label}: {target}: there is no folder {target.parent}") from None
                raise

    @contextlib.contextmanager
    def _remote(self, path: PurePosixPath) -> Iterator[paramiko.SFTPClient]:
        """The client for one operation at a time; what goes wrong names the host and `path`."""
        with self._lock, self._connection.guard():
            try:
                yield self._sftp
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"{self._connection.to.label}: {path}: no such file or folder"
                ) from None
            except (TimeoutError, ConnectionError, RemoteFileError):
                raise
            except OSError as error:
                if not self._connection.alive:
                    raise
                reason = error.strerror or str(error) or type(error).__name__
                raise RemoteFileError(f"{self._connection.to.label}: {path}: {reason}") from None


def _is_folder(sftp: paramiko.SFTPClient, path: PurePosixPath) -> bool:
    try:
        return stat.S_ISDIR(sftp.stat(str(path)).st_mode or 0)
    except OSError:
        return False
