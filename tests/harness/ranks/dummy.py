"""A rank that does what the job's `work` says, for one number or for all: the faults that the tests need, for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from harness.rank import RankContext, run


def main(rank: RankContext) -> int:
    """Report, act, end."""
    work = dict(rank.work)
    work |= work.pop(str(rank.rank), {})
    if work.get("collective"):
        import mlx.core as mx

        group = mx.distributed.init(strict=rank.ranks > 1, backend=rank.backend if rank.ranks > 1 else "any")
        total = mx.distributed.all_sum(mx.ones(4), group=group)[0].item()
    else:
        total = None
    rank.emit(
        {
            "event": "ready",
            "pid": os.getpid(),
            "supervisor": os.getppid(),
            "jobdir": str(rank.jobdir),
            "backend": rank.backend,
            "sum": total,
            "env": {k: os.environ.get(k) for k in work.get("env", [])},
            "hostfile": os.environ.get("MLX_HOSTFILE"),
        }
    )
    if work.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if work.get("child"):  # one that left the rank's process group and would outlive it
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        rank.emit({"event": "child", "pid": child.pid})
    if size := work.get("big_event"):
        rank.emit({"event": "big", "text": "ä" * size})
    if size := work.get("noise"):
        for _ in range(size // 1024):
            sys.stdout.write("o" * 1023 + "\n")
            sys.stderr.write("e" * 1023 + "\n")
    if size := work.get("inflate"):
        os.ftruncate(1, size)  # a hole: large to look at, nothing on the disk
    for step in range(work.get("steps", 0)):
        rank.emit({"event": "step", "step": step})
        time.sleep(0.05)
    if text := work.get("say"):
        print(text, flush=True)
    if number := work.get("signal"):
        os.kill(os.getpid(), number)
    if work.get("collective") == "forever":
        while True:
            mx.eval(mx.distributed.all_sum(mx.ones(4), group=group))
    if work.get("collective") == "twice":
        mx.eval(mx.distributed.all_sum(mx.ones(4), group=group))
    if work.get("spin"):
        while True:
            pass
    if seconds := work.get("sleep"):
        time.sleep(seconds)
    if work.get("raise"):
        raise ValueError(work["raise"])
    return int(work.get("status", 0))


if __name__ == "__main__":
    run(main)
