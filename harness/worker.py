"""The process that computes: one rank of a job, started by its supervisor as `python -m harness.worker JOBDIR`.

What it does depends on the kind of the job (`harness.work`). Everything is told as events; the controller
makes records of them.
"""

from __future__ import annotations

import sys

from harness.rank import RankContext, run
from harness.work.answer import AnswerWorker
from harness.work.ranks import RanksWorker
from harness.work.reference import ReferenceWorker
from sharding.errors import BadRequest

KINDS: dict[str, type[ReferenceWorker | RanksWorker | AnswerWorker]] = {
    "reference": ReferenceWorker,
    "ranks": RanksWorker,
    "answer": AnswerWorker,
}
REFUSED = 3
"""Exit status for a model that can't be built here; the reason is the log's last line."""


def main(context: RankContext) -> int:
    """Entry of a rank."""
    sys.path[:0] = [path for path in context.work.get("path", []) if path not in sys.path]
    try:
        return KINDS[context.work["kind"]](context).main()
    except BadRequest as refused:  # A checkpoint that does not fit its config, or is not on this host.
        sys.stderr.write(f"{refused}\n")
        return REFUSED


if __name__ == "__main__":
    run(main)
