"""The command, as a user types it: exit status, one line on stderr, JSON alone on stdout, nothing half-written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import cli, commands
from harness.runs import RunStore
from sharding.errors import BadRequest, Rejected
from tests.harness.shell import DATA, LLAMA, Done, shardbench, workplace

PLAN_FIELDS = {
    *("model_type", "family", "strategy", "ranks", "batch", "context", "dtype", "quantization", "valid"),
    *("reasons", "parameters", "collectives_per_token", "bytes_per_token", "weight_bytes_per_rank"),
    *("replicated_weight_bytes_per_rank", "weight_bytes_read_per_token", "cache_bytes_per_rank", "fits"),
}
VERIFY_FIELDS = {
    *("outcome", "reasons", "max_abs_diff", "relative_diff", "tolerance", "kl", "top1_agreement"),
    *("ranks_agree", "collectives_counted", "collectives_planned", "first_divergence"),
}
Command = Callable[..., Done]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model and some files that are none."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rude", raising=False)
    folder = workplace(tmp_path / "here", llama=LLAMA)
    (folder / "not.json").write_text("this is not JSON")
    (folder / "list.json").write_text("[1]")
    (folder / "nested.json").write_text("[" * 100_000)
    (folder / "untyped.json").write_text('{"hidden_size": 64}')
    (folder / "number.json").write_text('{"model_type": 5}')
    (folder / "unknown.json").write_text('{"model_type": "no_such_model", "num_hidden_layers": 2}')
    (folder / "bare.json").write_text('{"model_type": "llama"}')
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").mkdir()
    (folder / "loop.json").symlink_to("loop.json")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def command(here: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in this process: the same entry, without the second that an interpreter takes to start."""

    def run(*arguments: str) -> Done:
        capfd.readouterr()
        status = cli.main(arguments)
        out, err = capfd.readouterr()
        return Done(status, out, err)

    return run


def tree(folder: Path) -> set[Path]:
    """Every file below a folder, but what Python itself caches."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def assert_one_line(done: Done, *said: str) -> None:
    """A refusal: nothing on stdout, one line on stderr that names the trouble."""
    assert done.out == ""
    assert done.err.startswith("shardbench: ")
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    assert "internal error" not in done.err
    for text in said:
        assert text in done.err


BAD_SOURCES = [
    ("missing.json", "no such file"),
    ("no/such/folder", "no such file"),
    ("not.json", "not a readable JSON"),
    ("list.json", "JSON object"),
    ("nested.json", "not a readable JSON"),
    ("untyped.json", "model_type"),
    ("number.json", "model_type"),
    ("unknown.json", "no_such_model"),
    ("bare.json", "hidden_size"),
    ("binary.json", "not a readable JSON"),
    ("empty", "config.json"),
    ("broken", "config.json"),
    ("loop.json", "loop.json"),
    ("x" * 5000, "can't be read"),
    ("~no_such_user/model", "no_such_user"),
]


@pytest.mark.parametrize(("source", "said"), BAD_SOURCES, ids=[source[:20] for source, _ in BAD_SOURCES])
@pytest.mark.parametrize(
    "rest",
    [("plan",), ("verify", "--strategy", "tensor", "--ranks", "2"), ("run",), ("synth",)],
    ids=lambda rest: rest[0],
)
def test_a_bad_source_is_refused(
    command: Command, here: Path, source: str, said: str, rest: tuple[str, ...]
) -> None:
    """Whatever SOURCE is, a command that can't read it says so in one line, exits with 2 and writes nothing."""
    before = tree(here)
    arguments = (rest[0], source, *(["out"] if rest[0] == "synth" else []), *rest[1:])
    done = command(*arguments)
    assert done.status == 2
    assert_one_line(done, said)
    assert tree(here) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "'0'"),
        (["--ranks", "-2"], "'-2'"),
        (["--ranks", "2,"], "--ranks"),
        (["--ranks", "two"], "'two'"),
        (["--ranks", ""], "--ranks"),
        (["--batch", "0"], "--batch"),
        (["--context", "0"], "--context"),
        (["--strategy", "no-such"], "tensor"),
        (["--strategy", "tensor,,upstream"], "empty name"),
        (["--strategy", "no_such_module:split"], "no_such_module"),
        (["--strategy", "rude:no_such"], "no_such"),
        (["--strategy", "rude:NUMBER"], "not callable"),
        (["--strategy", "rude:"], "rude:"),
        (["--strategy", ":fine"], ":fine"),
        (["--set", "hidden_size"], "key=value"),
        (["--set", "=3"], "key=value"),
        (["--set", "no_such_field=3"], "no_such_field"),
        (["--set", "no_such.field=3"], "no_such"),
        (["--set", "hidden_size=wide"], "llama"),
        (["--set", "hidden_size=-1"], "llama"),
        (["--set", "model_type=no_such_model"], "no_such_model"),
        (["--layers", "0"], "--layers"),
        (["--layers", "9"], "1 to 2"),
        (["--quantize", "3bit"], "4bit"),
        (["--dtype", "int8"], "float32"),
        (["--seed", "-1"], "--seed"),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("name", ["plan", "run"])
def test_bad_options_are_refused(
    command: Command, here: Path, name: str, options: list[str], said: str
) -> None:
    """The line names the option, the value or the remedy; the status is 2 and nothing is written."""
    before = tree(here)
    done = command(name, "llama.json", *options)
    assert done.status == 2
    assert_one_line(done, said)
    assert tree(here) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "llama.json", "--ranks", "2"], "--strategy"),
        (["verify", "llama.json", "--strategy", "tensor"], "--ranks"),
        (["verify", "llama.json", "--strategy", "tensor", "--ranks", "0"], "--ranks"),
        (["verify", "llama.json", "--strategy", "no-such", "--ranks", "2"], "no-such"),
        (["verify", "llama.json", "--strategy", "tensor", "--ranks", "2", "--prompt", "hi"], "tokenizer"),
        (
            ["verify", "llama.json", "--strategy", "tensor", "--ranks", "2", "--keep-logs", "list.json"],
            "list.json",
        ),
        (["plan", "llama.json", "--memory", "much"], "128GB"),
        (["plan", "llama.json", "--memory", "0"], "memory size"),
        (["plan", "llama.json", "--memory", "1..5GB"], "memory size"),
        (["plan"], "SOURCE"),
        (["run"], "SOURCE"),
        (["run", "llama.json", "--backend", "jaccl"], "mpi, ring"),
        (["run", "llama.json", "--expect", "tensor"], "STRATEGY=OUTCOME"),
        (["run", "llama.json", "--expect", "tensor=fine"], "infeasible"),
        (["run", "llama.json", "--expect", "tesnor=ok"], "tesnor"),
        (["run", "llama.json", "--prompt", "hello"], "tokenizer"),
        (["run", "llama.json", "--steps", "0"], "--steps"),
        (["run", "llama.json", "--stall", "0"], "--stall"),
        (["run", "llama.json", "--stall", "inf"], "--stall"),
        (["run", "llama.json", "--deadline", "nan"], "--deadline"),
        (["run", "llama.json", "--cluster", "missing.toml"], "missing.toml"),
        (["run", "llama.json", "--cluster", "list.json"], "list.json"),
        (["run", "llama.json", "--out", "list.json"], "list.json"),
        (["run", "missing.toml"], "missing.toml"),
        (["run", "--resume", "no-such-run"], "no-such-run"),
        (["run", "--resume", "../no-such-run"], "no-such-run"),
        (["run", "--resume", "latest"], "no runs"),
        (["run", "llama.json", "--resume", "x"], "SOURCE"),
        (["run", "--resume", "x", "--steps", "9"], "--steps"),
        (["report"], "no runs"),
        (["report", "no-such-run"], "no-such-run"),
        (["synth", "llama.json"], "OUT"),
        (["synth", "llama.json", "list.json"], "exists"),
        (["synth", "llama.json", "list.json/below"], "list.json/below"),
        (["no-such-command"], "no-such-command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_requests_that_make_no_sense_are_refused(
    command: Command, here: Path, arguments: list[str], said: str
) -> None:
    """Each command's own bad requests: 2, one line that names the trouble, nothing written."""
    before = tree(here)
    done = command(*arguments)
    assert done.status == 2
    assert_one_line(done, said)
    assert tree(here) == before


def test_options_that_a_sweep_file_would_overrule_are_refused(command: Command, here: Path) -> None:
    """An option that would change nothing is no option: the file holds the whole request."""
    (here / "sweep.toml").write_text('[[models]]\nsource = "llama.json"\n')
    done = command("run", "sweep.toml", "--strategy", "tensor", "--set", "hidden_size=32")
    assert done.status == 2
    assert_one_line(done, "--strategy", "--set", "sweep.toml")


def test_without_arguments_help_is_shown(command: Command) -> None:
    """A bare command is no request: help, on stderr, and 2; asked for, help is the answer."""
    bare = command()
    assert (bare.status, bare.out) == (2, "")
    assert "plan" in bare.err
    asked = command("--help")
    assert (asked.status, asked.err) == (0, "")
    for name in ("plan", "verify", "run", "synth", "report"):
        assert name in asked.out
        assert command(name, "--help").status == 0
    assert command("--version").status == 0


def test_plan_answers_in_json_of_the_documented_fields(command: Command) -> None:
    """A row for each strategy, world size, batch and context; each with all fields, lists one entry a rank."""
    done = command("plan", "llama.json", "--ranks", "2,3,4", "--batch", "1,4", "--context", "8,64", "--json")
    assert (done.status, done.err) == (0, "")
    rows: list[dict[str, Any]] = done.json["rows"]
    assert len(rows) == 2 * 3 * 2 * 2
    for row in rows:
        assert set(row) >= PLAN_FIELDS
        assert bool(row["reasons"]) != row["valid"]
        if row["valid"]:
            assert row["fits"] is True
            for name in ("weight_bytes_per_rank", "replicated_weight_bytes_per_rank", "cache_bytes_per_rank"):
                assert len(row[name]) == row["ranks"]
    assert {row["ranks"] for row in rows if not row["valid"] and row["strategy"] == "tensor"} == {3}
    two = next(row for row in rows if (row["strategy"], row["ranks"], row["batch"]) == ("tensor", 2, 4))
    assert two["collectives_per_token"] == {"all_sum": 4}
    assert two["bytes_per_token"] == 4 * 4 * 64 * 4


def test_plan_fails_when_no_row_is_valid(command: Command) -> None:
    """1 when the answer is no everywhere, in words; the table says the same."""
    done = command("plan", "llama.json", "--ranks", "3", "--strategy", "tensor", "--json")
    assert (done.status, done.err) == (1, "")
    (row,) = done.json["rows"]
    assert any("3 ranks" in reason for reason in row["reasons"])
    table = command("plan", "llama.json", "--ranks", "3", "--strategy", "tensor")
    assert (table.status, table.err) == (1, "")
    assert row["reasons"][0] in table.out


def test_plan_says_when_memory_does_not_suffice(command: Command) -> None:
    """A split that is legal and too large is valid and does not fit, with the sizes in words."""
    done = command("plan", "llama.json", "--strategy", "tensor", "--memory", "0.1MB", "--json")
    (row,) = done.json["rows"]
    assert (row["valid"], row["fits"]) == (True, False)
    assert "GiB" in row["reasons"][0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "RuntimeError: no way to split this"),
        ("nonsense", "returned dict"),
        ("exits", "status 7"),
        ("leaves", "SystemExit"),
    ],
)
def test_a_users_code_may_do_anything_to_a_plan(command: Command, name: str, said: str) -> None:
    """Code that raises, ends the process or returns no module is a row that is not valid, and other rows stand."""
    done = command("plan", "llama.json", "--strategy", f"tensor,rude:{name}", "--json")
    assert (done.status, done.err) == (0, "")
    tensor, rude = done.json["rows"]
    assert tensor["valid"]
    assert not rude["valid"]
    assert said in rude["reasons"][0]
    assert "\n" not in rude["reasons"][0]


def test_a_users_code_that_prints_leaves_stdout_alone(command: Command) -> None:
    """With --json stdout holds the answer only, whatever the strategy prints."""
    done = command("plan", "llama.json", "--strategy", "rude:fine", "--json")
    assert done.status == 0
    (row,) = done.json["rows"]
    assert row["valid"]
    assert row["collectives_per_token"] == {"all_sum": 4}


def test_synth_writes_what_plan_and_a_second_synth_see(command: Command, here: Path) -> None:
    """The folder is whole and a SOURCE; a second time it is refused and stays as it is."""
    done = command("synth", "llama.json", "made", "--quantize", "4bit")
    assert (done.status, done.err) == (0, "")
    before = tree(here)
    assert {"config.json", "model.safetensors.index.json"} <= {path.name for path in before}
    planned = command("plan", "made", "--strategy", "tensor", "--json")
    assert planned.json["rows"][0]["quantization"] == "4bit"
    again = command("synth", "llama.json", "made")
    assert again.status == 2
    assert_one_line(again, "made")
    assert tree(here) == before
    quantised_twice = command("plan", "made", "--quantize", "8bit")
    assert quantised_twice.status == 2
    assert_one_line(quantised_twice, "quantised already")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "not an index"),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"short"), "can't be read"),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=3), "lacks"),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=1), "unknown"),
        (lambda folder: edit(folder / "config.json", intermediate_size=256), "wrongly shaped"),
    ],
    ids=["index", "shard", "more layers", "fewer layers", "wider"],
)
def test_a_damaged_checkpoint_is_told_in_one_line(
    command: Command, here: Path, harm: Callable[[Path], Any], said: str
) -> None:
    """Verify of weights that don't fit their config ends with a status that is not 0 and names the folder."""
    assert command("synth", "llama.json", "made").status == 0
    harm(here / "made")
    done = command(
        *(
            "verify",
            "made",
            "--strategy",
            "tensor",
            "--ranks",
            "1",
            "--json",
            "--keep-logs",
            str(here / "logs"),
        )
    )
    assert done.status == 1
    assert done.err == ""
    assert done.json["outcome"] == "crashed"
    assert said in done.json["reasons"][0]


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_report_reads_a_run_and_writes_its_page(command: Command, here: Path) -> None:
    """The table on stdout, or JSON alone; the page in the run's folder, or where it is wanted."""
    with RunStore.create(here / "results", {"sweep": {}}, {}, "one") as store:
        store.append(
            {"case": "a", "outcome": "infeasible", "reasons": ["no"], "strategy": "tensor", "ranks": 3}
        )
    done = command("report", "--json")
    assert done.status == 0
    assert done.json["runs"] == ["one"]
    assert [record["case"] for record in done.json["records"]] == ["a"]
    assert (store.path / "report.html").is_file()
    text = command("report", "one", "--page", "page.html")
    assert text.status == 0
    assert "infeasible" in text.out
    assert (here / "page.html").is_file()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BadRequest("two\nlines"), 2, "two lines"),
        (Rejected(["one", "two"]), 2, "one; two"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("a fault\nof ours"), 1, "internal error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_no_exception_is_a_traceback(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    """Whatever goes wrong below, a user sees one line and a status."""

    def fails(**_: Any) -> int:
        raise error

    monkeypatch.setattr(commands, "plan", fails)
    done = command("plan", "llama.json")
    assert (done.status, done.out) == (status, "")
    assert done.err.count("\n") == 1 + (status == 130 and done.err.startswith("\n"))
    assert said in done.err
    assert "Traceback" not in done.err


def test_the_installed_command_is_this_one(tmp_path: Path) -> None:
    """In a process of its own: status and streams are those of the entry point."""
    folder = workplace(tmp_path, llama=LLAMA)
    done = shardbench("plan", "llama.json", "--ranks", "2,4", "--strategy", "tensor", "--json", cwd=folder)
    assert (done.status, done.err) == (0, "")
    assert [row["ranks"] for row in done.json["rows"]] == [2, 4]
    refused = shardbench("plan", "missing.json", cwd=folder)
    assert refused.status == 2
    assert_one_line(refused, "missing.json")


def test_a_closed_pipe_is_no_fault(tmp_path: Path) -> None:
    """`shardbench plan ... | head -1` ends without a traceback."""
    import subprocess

    from tests.harness.shell import argv, environment

    folder = workplace(tmp_path, llama=LLAMA)
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        argv("plan", "llama.json", "--json"),
        cwd=folder,
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert process.returncode != 0
    assert "Traceback" not in process.stderr
    assert "Exception ignored" not in process.stderr


def test_v4_flash_is_planned_without_weights(command: Command) -> None:
    """The published config: 3 and 16 ranks are refused in words, 86 all_sums a token, also where they are traced."""
    done = command("plan", str(DATA / "DeepSeek-V4-Flash.json"), "--ranks", "2,3,16", "--json")
    assert done.status == 0
    rows = {(row["strategy"], row["ranks"]): row for row in done.json["rows"]}
    for ranks in (3, 16):
        assert not rows["tensor", ranks]["valid"]
        assert any(f"{ranks} ranks" in reason for reason in rows["tensor", ranks]["reasons"])
    assert rows["tensor", 2]["collectives_per_token"] == {"all_sum": 86}
    assert rows["upstream", 2]["collectives_per_token"] == {"all_sum": 86}
    for strategy in ("tensor", "replicated-wo_b", "replicated-wo_b-late", "gathered-wo_b", "upstream"):
        assert rows[strategy, 2]["bytes_per_token"] > 0
