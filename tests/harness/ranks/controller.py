"""A controller to be killed: `controller.py BACKEND RANKS INTO WORK` runs one job and prints its events as they come."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness.hosts import LocalHost
from harness.launch import JobSpec, run_job


def main(backend: str, ranks: str, into: str, work: str) -> None:
    """Run the job; say how it ended."""

    def show(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    spec = JobSpec(
        ranks=int(ranks),
        backend=backend,
        argv=(str(Path(__file__).with_name("dummy.py")),),
        env={},
        deadline_seconds=60,
        stall_seconds=50,
        work=json.loads(work),
    )
    try:
        verdict = run_job(LocalHost(), spec, Path(into), show)
    except KeyboardInterrupt:
        print(json.dumps({"event": "interrupted"}), flush=True)
        raise
    print(json.dumps({"event": "verdict", "outcome": verdict.outcome}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
