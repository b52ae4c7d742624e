"""How much of a core the launcher takes while the ranks are timed."""

from __future__ import annotations

import time
from typing import Any

from harness import procs, protocol
from harness.rank import RankContext


class LauncherMeter:
    """CPU seconds that mlx.launch uses while the ranks are timed, and whether it was stopped."""

    def __init__(self, context: RankContext) -> None:
        record = protocol.read_record(context.jobdir / protocol.LAUNCHER) if context.ranks > 1 else None
        self._identity = procs.ProcessId.read(record)
        self._began = time.perf_counter()
        self._before = self._seconds()

    def _seconds(self) -> float | None:
        process = self._identity.process() if self._identity else None
        with procs.gone_is_fine():
            if process is not None:
                times = process.cpu_times()
                return float(times.user + times.system)
        return None

    def stop(self) -> dict[str, Any]:
        """What was used since the start; empty without a launcher."""
        after = self._seconds()
        if self._identity is None or self._before is None or after is None:
            return {}
        process = self._identity.process()
        stopped = False
        with procs.gone_is_fine():
            stopped = process is not None and process.status() == "stopped"
        return {
            "cpu_seconds": round(after - self._before, 3),
            "seconds": round(time.perf_counter() - self._began, 3),
            "stopped": stopped,
        }
