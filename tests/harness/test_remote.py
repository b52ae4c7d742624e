"""A remote host and its agent, over a real sshd: what arrives, what comes back, and how a loss is noticed."""

from __future__ import annotations

import json
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.deploy import own_packages
from harness.errors import Unreachable, UsageError
from harness.remote import SshAgent, SshHost
from harness.ssh import Timeouts
from tests.lab.sshd import Sshd, sshd

__all__ = ["sshd"]  # a fixture

AWKWARD = "work 'n \"co\" $(touch x) c'd;"
TIMEOUTS = Timeouts(heartbeat=0.5, silence=5.0)

AGENT = '''"""An agent that does what the file `do` in its job directory says."""
import json, os, signal, sys, time
from pathlib import Path

jobdir = Path(sys.argv[1])
do = (jobdir / "do").read_text()
if do == "tell":
    print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "tty": sys.stdin.isatty(),
                      "leader": os.getsid(0) == os.getpid(), "pid": os.getpid()}), flush=True)
    sys.exit(3)
if do == "flood":
    for stream in (sys.stderr, sys.stdout):
        for number in range(3 * 1024):
            stream.write(f"{number:04} " + "x" * 1018 + "\\n")
if do == "bytes":
    for part in (b"\\xf0\\x90", b"\\x8d\\x88 \\xff\\nno end", b" \\xe2\\x82"):
        os.write(1, part)
        time.sleep(0.1)
if do in ("wait", "deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    if do == "wait":
        sys.stdin.read()
        (jobdir / "ended").touch()
    time.sleep(0.0 if do == "wait" else 600)
'''


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our own packages with that agent in the place of ours."""
    package = tmp_path_factory.mktemp("code") / "harness"
    package.mkdir()
    for name in ("__init__.py", "tree.py"):
        shutil.copy(own_packages()["harness"] / name, package)
    (package / "agent.py").write_text(AGENT)
    return {"harness": package}


@pytest.fixture(scope="module")
def host(
    sshd: Sshd, packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SshHost]:
    """A connected host whose workdir has spaces, quotes and a command in its name. One for all tests: a connection that
    one of them breaks is made anew by the next that makes a job directory."""
    workdir = str(tmp_path_factory.mktemp("host") / AWKWARD)
    described = sshd.host(workdir=workdir, env={"TOKEN": "s3cret 'x'", "PATH": "/opt/x:/usr/bin:/bin"})
    with SshHost(described, packages=packages, timeouts=TIMEOUTS) as connected:
        yield connected


def start(host: SshHost, do: str) -> tuple[SshAgent, str]:
    jobdir = host.create_job_dir(secrets.token_hex(16))
    host.write(f"{jobdir}/do", do.encode())
    return host.start_agent(jobdir), jobdir


def test_the_agent_runs_as_agreed(host: SshHost) -> None:
    """It gets the job directory, its own session, no terminal, the deployed code first, exactly the stated environment
    with the job's nonce, and its status comes back."""
    agent, jobdir = start(host, "tell")
    told = json.loads(next(agent.lines(30)))
    assert told["argv"] == [jobdir]
    assert AWKWARD in jobdir
    assert told["cwd"] == str(host.code.path)
    assert (told["tty"], told["leader"]) == (False, True)
    env = told["env"]
    assert env["SHARDBENCH_NONCE"].startswith(Path(jobdir).name)
    assert env["PYTHONPATH"] == str(host.code.path)
    assert env["PATH"] == f"{Path(sys.executable).parent}:/opt/x:/usr/bin:/bin"
    assert env["TOKEN"] == "s3cret 'x'"
    # PWD and such are the shell's own.
    assert set(env) - {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE", "__CF_USER_TEXT_ENCODING"} == {
        *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "PYTHONPATH", "PYTHONUTF8", "SHARDBENCH_NONCE", "TOKEN")
    }
    assert list(agent.lines(30)) == []
    assert agent.wait(30) == 3
    assert not list(Path(host.files.root).parent.rglob("x"))  # what a shell would have touched


def test_a_job_directory_is_private_and_its_environment_is_in_no_command_line(host: SshHost) -> None:
    """Folders are 0700, files 0600, and a value of the environment stands neither in
    the agent's arguments nor in a file that outlives its start."""
    agent, jobdir = start(host, "wait")
    pid = int(next(agent.lines(30)))
    assert "s3cret" not in " ".join(psutil.Process(pid).cmdline())
    assert [stat.S_IMODE(path.stat().st_mode) for path in (Path(jobdir).parent, Path(jobdir))] == [
        0o700,
        0o700,
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path(jobdir).iterdir()} == {0o600}
    assert "s3cret" not in "".join(path.read_text() for path in Path(jobdir).iterdir())
    agent.close_stdin()
    assert agent.wait(30) == 0


def test_six_mebibytes_do_not_block(host: SshHost) -> None:
    """3 MiB on stderr and then 3 MiB on stdout, each more than a channel's window, all come through."""
    agent, _ = start(host, "flood")
    lines = list(agent.lines(30))
    assert len(lines) == 3 * 1024
    assert {len(line) for line in lines} == {1023}
    assert agent.wait(30) == 0
    assert agent.errors().endswith(lines[-1] + "\n")


def test_a_character_may_be_cut_in_two(host: SshHost) -> None:
    """Bytes that come in pieces make the character they are; what is no text at all is replaced, not raised."""
    agent, _ = start(host, "bytes")
    assert list(agent.lines(30)) == ["\U00010348 \ufffd", "no end \ufffd"]


def test_lines_give_up_after_their_timeout(host: SshHost) -> None:
    """A silent agent ends the iteration, not the connection: later lines are still to be had."""
    agent, jobdir = start(host, "wait")
    assert len(list(agent.lines(1.0))) == 1
    assert list(agent.lines(0.0)) == []
    assert agent.wait(0.0) is None
    agent.close_stdin()
    agent.close_stdin()
    assert agent.wait(30) == 0
    assert (Path(jobdir) / "ended").exists()


def test_a_deaf_agent_is_killed(host: SshHost) -> None:
    """One that ignores the end of its stdin and SIGTERM is gone after kill, which may be repeated."""
    agent, _ = start(host, "deaf")
    process = psutil.Process(int(next(agent.lines(30))))
    agent.kill()
    assert agent.wait(30) == -1
    process.wait(10)
    agent.kill()


def test_a_lost_connection_is_unreachable(host: SshHost, sshd: Sshd) -> None:
    """When the server's session is killed, reading, waiting, files and a new start all say so at once in one line, and
    the agent reads the end of its lifeline."""
    agent, jobdir = start(host, "wait")
    assert len(list(agent.lines(0.5))) == 1
    sshd.signal_sessions(9)
    for action in (
        lambda: list(agent.lines(30)),
        lambda: agent.wait(30),
        lambda: host.collect(jobdir, Path(jobdir)),
        lambda: host.write(f"{jobdir}/x", b""),
        lambda: host.start_agent(jobdir),
    ):
        with pytest.raises(Unreachable, match=r"^lab: ") as caught:
            action()
        assert "\n" not in str(caught.value)
    agent.close_stdin()
    agent.kill()
    until = time.monotonic() + 10
    while not (Path(jobdir) / "ended").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (Path(jobdir) / "ended").exists()


def test_the_evidence_is_collected(host: SshHost, tmp_path: Path) -> None:
    """Verdict, logs and the ranks' files come back, private; links, hidden files and the job's input stay."""
    jobdir = Path(host.create_job_dir("0" * 32))
    rank = jobdir / "rank-0"
    rank.mkdir()
    data = bytes(range(256)) * 10_000
    for path in (
        jobdir / "verdict.json",
        jobdir / "agent.log",
        jobdir / "input",
        rank / "log",
        rank / "a 'b'",
    ):
        path.write_bytes(data)
    (rank / ".part").touch()
    (rank / "link").symlink_to("/etc/hostname")
    (jobdir / "rank-1").symlink_to("/etc")
    into = tmp_path / "into"
    host.collect(str(jobdir), into)
    got = {str(path.relative_to(into)): path for path in into.rglob("*") if path.is_file()}
    assert set(got) == {"verdict.json", "agent.log", "rank-0/log", "rank-0/a 'b'"}
    assert {path.read_bytes() for path in got.values()} == {data}
    assert {stat.S_IMODE(path.stat().st_mode) for path in got.values()} == {0o600}
    host.remove(str(jobdir))
    assert not jobdir.exists()
    host.remove(str(jobdir))
    host.collect(str(jobdir), into)


def test_a_log_that_still_grows_is_collected(host: SshHost, tmp_path: Path) -> None:
    """A file that is written to while it is fetched doesn't spoil the collection."""
    jobdir = Path(host.create_job_dir("1" * 32))
    (jobdir / "rank-0").mkdir()
    log = jobdir / "rank-0" / "log"
    log.write_bytes(b"x" * 3_000_000)
    # Ends by itself, in case this test is killed.
    loop = "import sys, time\nf = open(sys.argv[1], 'ab', 0)\nfor _ in range(20_000): f.write(b'y' * 997); time.sleep(1e-4)"
    writer = psutil.Popen([sys.executable, "-c", loop, str(log)])
    try:
        while log.stat().st_size == 3_000_000:
            time.sleep(0.01)
        host.collect(str(jobdir), tmp_path / "into")
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    assert (tmp_path / "into/rank-0/log").read_bytes()[:3_000_000] == b"x" * 3_000_000


def test_only_job_directories_are_removed(host: SshHost) -> None:
    """Anything that create_job_dir can't have made is refused."""
    work = host.files.root
    for jobdir in (
        "/tmp",
        work,
        f"{work}/jobs",
        f"{work}/code",
        f"{work}/jobs/../code/0123456789ab",
        "jobs/x",
        "",
    ):
        with pytest.raises(ValueError, match="not a job directory"):
            host.remove(str(jobdir))
    assert Path(host.code.path).is_dir()


def test_a_job_directory_is_made_once(host: SshHost) -> None:
    """The same nonce again is an error, and so is one that isn't a nonce."""
    host.create_job_dir("2" * 32)
    with pytest.raises(FileExistsError):
        host.create_job_dir("2" * 32)
    with pytest.raises(ValueError, match="nonce"):
        host.create_job_dir("../../../etc")


def test_what_can_not_be_written_names_host_and_path(host: SshHost) -> None:
    """A file system that refuses is one line, as a host that can't be used."""
    jobdir = host.create_job_dir("3" * 32)
    with pytest.raises(Unreachable, match=r"lab: .*/none/x: there is no folder") as caught:
        host.write(f"{jobdir}/none/x", b"")
    assert "\n" not in str(caught.value)


def test_damaged_code_is_noticed(sshd: Sshd, packages: dict[str, Path], tmp_path: Path) -> None:
    """Code on the host that isn't what its folder says any more is sent again; intact code isn't."""
    described = sshd.host(workdir=str(tmp_path / "work"))
    copied = []
    for _ in range(2):
        with SshHost(described, packages=packages) as host:
            copied.append(host.code.copied)
    (Path(host.code.path) / "harness/agent.py").write_text("damaged")
    with SshHost(described, packages=packages) as host:
        copied.append(host.code.copied)
    (Path(host.code.path) / "harness/tree.py").write_text("damaged (")
    with SshHost(described, packages=packages) as host:
        copied.append(host.code.copied)
    assert copied == [3, 0, 3, 3]
    assert (Path(host.code.path) / "harness/agent.py").read_text() == AGENT


def test_the_interpreter_s_facts_are_known(host: SshHost) -> None:
    """What the far interpreter is and has is there before any job."""
    assert host.facts["version"] == list(sys.version_info[:3])
    assert {"mlx", "mlx-lm"} <= set(host.facts["packages"])
    assert host.facts["memory"] == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "can't be run there"),
        ("exit 5", "fails (status 5): it printed nothing"),
        ("echo first >&2; echo 'no luck' >&2; exit 1", "fails (status 1): no luck"),
        ("echo hello", "fails (status 0)"),
        (
            'echo \'{mark}{{"version": [3, 9, 6], "missing": [], "digest": null}}\'',
            "is 3.9.6, and 3.11 is needed",
        ),
        (
            'echo \'{mark}{{"version": [3, 12, 0], "missing": ["mlx.core"], "digest": null}}\'',
            "has no mlx.core; install",
        ),
    ],
)
def test_an_unusable_interpreter_is_refused_before_any_job(
    sshd: Sshd, packages: dict[str, Path], tmp_path: Path, script: str | None, message: str
) -> None:
    """One line names the host, the interpreter, what is wrong and the key to change."""
    python = tmp_path / "it's a=python"
    if script is not None:
        python.write_text("#!/bin/sh\n" + script.format(mark="shardbench-probe ") + "\n")
        python.chmod(0o755)
    with pytest.raises(UsageError) as caught:
        SshHost(sshd.host(python=str(python), workdir=str(tmp_path / "work")), packages=packages)
    assert message in str(caught.value)
    assert f"lab: python {str(python)!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_without_an_interpreter_is_refused(sshd: Sshd) -> None:
    """A host file that names none can't run a job, and says which key is missing."""
    with pytest.raises(UsageError, match="lab: no interpreter; give the host `python`"):
        SshHost(sshd.host(python=None))
