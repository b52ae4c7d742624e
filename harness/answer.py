"""Ask a split model a question and read what it says: the plainest sign that a split is right."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from harness.hosts import LocalHost
from harness.launch import JobSpec, run_job
from harness.place import rank_environment
from harness.sweep import WORKER
from sharding import source as sources

TOKENS = 32


class NoAnswer(RuntimeError):
    """The ranks ended without an answer."""


def ask(folder: Path, question: str, *, ranks: int, strategy: str = "tensor", tokens: int = TOKENS) -> str:
    """The greedy answer of a checkpoint's model on `ranks` local ranks.

    Args:
        folder: Checkpoint with a tokenizer that has a chat template.
        question: One user's turn.
        ranks: World size.
        strategy: How to split.
        tokens: At most so many are generated.

    Raises:
        NoAnswer: The ranks gave none.
    """
    from transformers import AutoTokenizer

    from harness import blas

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    turn = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    found: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        if event.get("event") == "answer" and event["rank"] == 0:
            found.extend(event["ids"])

    spec = JobSpec(
        ranks=ranks,
        backend="mpi" if ranks > 1 else "none",
        argv=WORKER,
        env=rank_environment(blas.preload()),
        deadline_seconds=600,
        stall_seconds=120,
        work={
            "kind": "answer",
            "source": sources.resolve(str(folder)).to_json(),
            "settings": {},
            "shapes": [],
            "strategy": strategy,
            "ids": [int(i) for i in encoded],
            "tokens": tokens,
            "stop": sorted({i for i in (tokenizer.eos_token_id,) if i is not None}),
        },
    )
    logs = Path(tempfile.mkdtemp(prefix="shardbench-answer-"))
    verdict = run_job(LocalHost(), spec, logs, listen)
    if verdict.outcome != "ok" or not found:
        raise NoAnswer(f"{ranks} ranks gave no answer: {verdict.reason}; logs in {logs}")
    shutil.rmtree(logs, ignore_errors=True)
    return str(tokenizer.decode(found, skip_special_tokens=True)).strip()
