"""Plan a user's own strategy in a process of its own: foreign code may end the process that calls it, or never return.

    rows = plan_apart(source, "my_code:split", ranks=2, batches=[1, 4], contexts=[64])

The parent is a controller with a run to keep; whatever the code does, here it becomes a row with a reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import procs, protocol
from sharding import rows, strategies
from sharding.errors import BadRequest
from sharding.rows import Row
from sharding.source import Source

SECONDS = 120.0
"""A trace of the largest published model takes a few; this much later the code is taken for stuck."""


def plan_apart(
    source: Source,
    name: str,
    ranks: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    memory: int | None = None,
    *,
    seconds: float = SECONDS,
) -> list[Row]:
    """As `sharding.rows.make_rows` for one strategy and world size.

    Args:
        name: `package.module:function`.
        seconds: After so long the row says that the code did not return.

    Raises:
        BadRequest: The model itself can't be built, or the function not imported.
    """
    request = {
        "source": source.to_json(),
        "name": name,
        "ranks": ranks,
        "batches": list(batches),
        "contexts": list(contexts),
        "memory": memory,
        "path": [entry or os.getcwd() for entry in sys.path],
    }
    with tempfile.TemporaryDirectory(prefix="shardbench-plan-") as folder:
        answer = Path(folder) / "answer.json"
        problem = _run(json.dumps(request).encode(), answer, seconds)
        found: Any = protocol.read_record(answer)
    if found is None:
        reason = f"{name} {problem}"
        return rows.refused(
            source, strategies.resolve(name, source.model_type), ranks, batches, contexts, reason
        )
    if "refused" in found:
        raise BadRequest(found["refused"])
    return [Row.from_json(row) for row in found["rows"]]


def _run(request: bytes, answer: Path, seconds: float) -> str:
    """Have the rows written to `answer`; what happened instead, in words, should there be none."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.apart", str(answer)],
        env={**os.environ, "PYTHONPATH": procs.python_path(os.environ.get("PYTHONPATH", ""))},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # foreign code may print: the command's own output is an answer, maybe JSON
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=procs.die_with_parent(),  # noqa: PLW1509 - nothing here holds a lock that the child needs
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(request, timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it started
        late = process.poll() is None
        status = process.wait()
    if late:
        return f"did not return from planning within {seconds:g} s"
    how = protocol.signal_name(-status) if status < 0 else f"status {status}"
    return f"ended the process that planned it, with {how}"


def main(argv: Sequence[str]) -> int:
    """Entry of the process apart: the request on stdin, the rows to the file argv[1]."""
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    source = Source.from_json(request["source"])
    try:
        strategy = strategies.resolve(request["name"], source.model_type)
        made = rows.make_rows(
            source,
            [strategy],
            [request["ranks"]],
            request["batches"],
            request["contexts"],
            request["memory"],
        )
    except BadRequest as refused:
        protocol.write_record(Path(argv[1]), {"refused": str(refused)})
        return 0
    protocol.write_record(Path(argv[1]), {"rows": [row.to_json() for row in made]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
