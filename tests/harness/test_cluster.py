"""Cluster files: what they mean, and what is refused in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.cluster import Cluster, ClusterHost, load_cluster
from harness.errors import UsageError

WHOLE = """
name = "desk"
backend = "jaccl"
head = "b"

[[hosts]]
ssh = "mac-a.local"
name = "a"
ips = ["192.168.0.1"]
rdma = ["", "rdma_en2"]

[[hosts]]
ssh = "10.0.0.2"
name = "b"
user = "me"
port = 2222
key = "keys/id"
known_hosts = "keys/known"
ips = ["192.168.0.2"]
rdma = ["rdma_en3", ""]
python = "/Users/me/my venv/bin/python"
workdir = "/Users/me/it's here"
env = { MLX_METAL_FAST_SYNCH = "1" }
"""


def load(tmp_path: Path, text: str, name: str = "cluster.toml") -> Cluster:
    path = tmp_path / name
    path.write_text(text)
    return load_cluster(path)


def refusal(tmp_path: Path, text: str, name: str = "cluster.toml") -> str:
    """The one line that a file is refused with, from the file's name on."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path}/{name}")
    return message.removeprefix(f"{tmp_path}/")


def jaccl(first: str, second: str) -> str:
    """A host file of two hosts with these rdma rows, a host a line."""
    hosts = f'{{"ssh": "a", "ips": ["1"], "rdma": {first}}},\n{{"ssh": "b", "rdma": {second}}}'
    return f'{{"backend": "jaccl", "hosts": [\n{hosts}]}}'


def test_every_field_is_read(tmp_path: Path) -> None:
    """Each key of the file arrives, relative paths count from the file, and an empty rdma entry is none."""
    (tmp_path / "keys").mkdir()
    for name in ("id", "known"):
        (tmp_path / "keys" / name).touch()
    cluster = load(tmp_path, WHOLE)
    assert (cluster.name, cluster.backend) == ("desk", "jaccl")
    assert [host.rdma for host in cluster.hosts] == [(None, "rdma_en2"), ("rdma_en3", None)]
    assert cluster.head_host == ClusterHost(
        ssh="10.0.0.2",
        name="b",
        user="me",
        port=2222,
        key=tmp_path / "keys/id",
        known_hosts=tmp_path / "keys/known",
        ips=("192.168.0.2",),
        rdma=("rdma_en3", None),
        python="/Users/me/my venv/bin/python",
        workdir="/Users/me/it's here",
        env={"MLX_METAL_FAST_SYNCH": "1"},
    )


def test_one_line_is_a_cluster(tmp_path: Path) -> None:
    """A host's ssh name is enough: it is the head, named as it is reached, with a private workdir at home."""
    cluster = load(tmp_path, '[[hosts]]\nssh = "mac"\n')
    assert (cluster.name, cluster.backend, cluster.head) == ("cluster", "ring", "mac")
    assert cluster.head_host.workdir == "~/.shardbench"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = [", "not TOML"),
        ("name = 'x'", "hosts: () is not valid; expected at least one [[hosts]]"),
        ("hosts = 3", "cluster.toml:1: hosts: 3 is no list"),
        ("hosts = ['a']", "hosts[0]: 'a' is no table"),
        ('\n[[hosts]]\nuser = "x"', "cluster.toml:2: hosts[0].ssh: is missing"),
        (
            '[[hosts]]\nssh = "a"\nport = 70000',
            "cluster.toml:3: hosts[0].port: 70000 is not valid; expected a whole",
        ),
        ('[[hosts]]\nssh = "a"\nport = "22"', "cluster.toml:3: hosts[0].port: '22' is not valid"),
        (
            '[[hosts]]\nssh = "-oProxyCommand=x"',
            "cluster.toml:2: hosts[0].ssh: '-oProxyCommand=x' is not valid",
        ),
        ('[[hosts]]\nssh = "a b"', "hosts[0].ssh: 'a b' is not valid"),
        (
            '[[hosts]]\nssh = "a"\npython = "python3"',
            "cluster.toml:3: hosts[0].python: 'python3' not an absolute",
        ),
        ('[[hosts]]\nssh = "a"\nworkdir = "work"', "hosts[0].workdir: 'work' neither absolute nor below ~"),
        ('[[hosts]]\nssh = "a"\nworkdir = "/"', "hosts[0].workdir: '/' is a whole file system"),
        ('[[hosts]]\nssh = "a"\nworkdir = "/x/../y"', "hosts[0].workdir: '/x/../y' has '..'"),
        ('[[hosts]]\nssh = "a"\nworkdir = "/x\\ny"', "hosts[0].workdir: '/x\\ny' has '..' or control"),
        ('[[hosts]]\nssh = "a"\nkey = "nowhere"', "cluster.toml:3: hosts[0].key: "),
        (
            '[[hosts]]\nssh = "a"\npasword = "x"',
            "cluster.toml:3: hosts[0].pasword: no such key; expected one of ssh,",
        ),
        ('hots = 1\n[[hosts]]\nssh = "a"', "cluster.toml:1: hots: no such key"),
        (
            'backend = "tcp"\n[[hosts]]\nssh = "a"',
            "cluster.toml:1: backend: 'tcp' is not valid; expected one of ring",
        ),
        ('head = "b"\n[[hosts]]\nssh = "a"', "cluster.toml:1: head: 'b' is no host; give one of a"),
        ('[[hosts]]\nssh = "a"\n[[hosts]]\nssh = "a"', "cluster.toml:3: hosts[1].name: 'a' is used twice"),
        (
            '[[hosts]]\nssh = "a"\nips = ["i"]\n\n[[hosts]]\nssh = "b"',
            "cluster.toml:5: hosts[1].ips: b has none; ring",
        ),
        ('[[hosts]]\nssh = "a"\nenv = 3', "cluster.toml:3: hosts[0].env: it is no table"),
        (
            '[[hosts]]\nssh = "a"\nenv = { "A-B" = "1" }',
            "hosts[0].env: 'A-B' is not the name of an environment",
        ),
    ],
)
def test_a_bad_file_is_refused_by_place(tmp_path: Path, text: str, message: str) -> None:
    """A refusal is one line with the file, the line where it can be told, the key, the value and the remedy."""
    assert message in refusal(tmp_path, text)


def test_an_environment_value_is_never_repeated(tmp_path: Path) -> None:
    """A message about the environment doesn't show a value, which may be a token."""
    message = refusal(tmp_path, '[[hosts]]\nssh = "a"\n[hosts.env]\nTOKEN = 12345678\n')
    assert "TOKEN" in message
    assert "12345678" not in message


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    """A path without a file, or a folder, is refused with its name."""
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            load_cluster(path)


def test_an_mlx_host_file_is_a_cluster(tmp_path: Path) -> None:
    """The file that mlx.launch reads is taken as it is; its envs reach every host."""
    text = json.dumps(
        {
            "backend": "jaccl",
            "envs": ["MLX_METAL_FAST_SYNCH=1", "A=b=c"],
            "hosts": [
                {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, ["rdma_en2", "rdma_en3"]]},
                {"ssh": "b", "ips": [], "rdma": ["rdma_en2", None], "python": "/usr/bin/python3"},
            ],
        }
    )
    cluster = load(tmp_path, text, "hosts.json")
    assert (cluster.backend, cluster.head) == ("jaccl", "a")
    assert [dict(host.env) for host in cluster.hosts] == [{"MLX_METAL_FAST_SYNCH": "1", "A": "b=c"}] * 2
    assert cluster.hosts[0].rdma == (None, ("rdma_en2", "rdma_en3"))
    assert cluster.hosts[1].python == "/usr/bin/python3"


def test_mlx_own_list_form_is_a_ring(tmp_path: Path) -> None:
    """A bare list of hosts, also under a name without a suffix, is a ring."""
    cluster = load(tmp_path, '[{"ssh": "a", "ips": ["10.0.0.1"]}]', "hostfile")
    assert (cluster.backend, cluster.name) == ("ring", "hostfile")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("7", "7 is no list of hosts"),
        ('{"backend": "ring"}', "expected at least one"),
        ('{"backend": "ring", "hosts": []}', "expected at least one"),
        ('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]', "MLX_HOSTFILE"),
        ('[{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1"}]', "'127.0.0.1' is used twice"),
        ('[{"ssh": "a"}, {"ssh": "b"}]', "hosts[0].ips: a has none"),
        ('[{"ips": ["10.0.0.1"]}]', "hosts[0].ssh: is missing"),
        ('{"hosts": [{"ssh": "a"}], "envs": ["X"]}', "envs[0]: 'X' is no NAME=value"),
        ('{"hosts": [{"ssh": "a"}], "envs": "X=1"}', "envs: 'X=1' is no list"),
        (jaccl('[null, "x"]', '["x"]'), "hosts.json:3: hosts[1].rdma: 1 entries for 2 hosts"),
        (jaccl("[null, null]", "[null, null]"), "hosts.json:2: hosts[0].rdma[1]: no device towards b"),
        (jaccl('["x", "x"]', '["x", null]'), "hosts.json:2: hosts[0].rdma[0]: 'x' links a to itself"),
    ],
)
def test_a_bad_host_file_is_refused_by_place(tmp_path: Path, text: str, message: str) -> None:
    """What mlx.launch would take for an empty job, or fail on later, is refused at once."""
    assert message in refusal(tmp_path, text, "hosts.json")


def test_a_jaccl_ring_needs_its_neighbours_only(tmp_path: Path) -> None:
    """Four hosts in a jaccl ring may lack the links across."""
    rdma = [[None, "x", None, "x"], ["x", None, "x", None], [None, "x", None, "x"], ["x", None, "x", None]]
    hosts = [{"ssh": f"h{i}", "ips": ["10.0.0.1"], "rdma": row} for i, row in enumerate(rdma)]
    assert len(load(tmp_path, json.dumps({"backend": "jaccl-ring", "hosts": hosts}), "h.json").hosts) == 4
    assert "no device" in refusal(tmp_path, json.dumps({"backend": "jaccl", "hosts": hosts}), "h.json")


def test_a_bad_host_can_not_be_built() -> None:
    """The value object refuses what the file may not say, and doesn't change."""
    with pytest.raises(ValidationError):
        ClusterHost(ssh="a", name="a", port=0)
    host = ClusterHost(ssh="a", name="a")
    with pytest.raises(ValidationError):
        setattr(host, "port", 22)  # noqa: B010 - the plain assignment is a type error
