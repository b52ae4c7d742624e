"""What the tests of whole commands share: the command as a process, small models on disk, and a user's own code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import procs
from tests.harness.jobs import alive

DATA = Path(__file__).parents[1] / "data"
RUDE = Path(__file__).parent / "rude.py"
"""Strategies that misbehave; copied to where a command is run, `--strategy rude:name` finds them."""
MARK = "MARK_OF_A_TEST"  # not SHARDBENCH_*: jobs drop what an outer job may have left

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "rope_theta": 10000.0, "max_position_embeddings": 4096}
V4_SETS = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 4,
    "o_lora_rank": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
}
"""What makes the published Flash config small, every kind of layer kept by `--layers 4`."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout, which holds JSON and nothing else."""
        return json.loads(self.out)


def environment(mark: str = "") -> dict[str, str]:
    """Of a command: this tree, no hub, and a mark that its descendants inherit."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SHARDBENCH_")}
    return {**inherited, "PYTHONPATH": procs.python_path(""), "HF_HUB_OFFLINE": "1", MARK: mark}


def argv(*arguments: str | Path) -> list[str]:
    """The command, in a process of its own."""
    return [sys.executable, "-m", "harness.cli", *map(str, arguments)]


def shardbench(*arguments: str | Path, cwd: Path, timeout: float = 150) -> Done:
    """Run the command to its end."""
    done = subprocess.run(
        argv(*arguments),
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Running:
    """The command while it runs, its stderr in a file."""

    def __init__(self, *arguments: str | Path, cwd: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.errors = cwd / "stderr"
        self.output = cwd / "stdout"
        with self.errors.open("wb") as errors, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                argv(*arguments),
                cwd=cwd,
                env=environment(self.mark),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def end(self, timeout: float = 100) -> Done:
        """Wait for its end."""
        status = self.process.wait(timeout)
        return Done(status, self.output.read_text(), self.errors.read_text())

    def descendants(self) -> list[psutil.Process]:
        """Living processes that inherited its environment, itself not counted."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK) == self.mark
            except (psutil.Error, OSError):
                continue
            if marked and process.pid != self.process.pid and alive(process.pid):
                found.append(process)
        return found

    def named(self, *parts: str) -> list[psutil.Process]:
        """Descendants whose command line holds all these words."""
        found = []
        for process in self.descendants():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if all(any(part in word for word in words) for part in parts):
                found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def stop(self) -> None:
        """End it and what it started, should a test have failed in between."""
        for process in [self.process, *self.descendants()]:
            try:
                process.kill()
            except (psutil.Error, ProcessLookupError):
                continue
        self.process.wait()


def workplace(folder: Path, **configs: Mapping[str, Any]) -> Path:
    """A folder to stand in: `NAME.json` for each config, and `rude.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in (configs or {"llama": LLAMA}).items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    shutil.copy(RUDE, folder / "rude.py")
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a `records.jsonl`; raises on any line that isn't whole."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def toml_list(values: Sequence[Any]) -> str:
    """As TOML and JSON both write it."""
    return json.dumps(list(values))
