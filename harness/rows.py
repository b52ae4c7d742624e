"""Records as a reader wants them: one section a model, one row a case, every figure with its unit.

The terminal table and the page are both made from this, so that they can't tell different stories.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import statistics

NOT_MEASURED = "–"
INTERLEAVING = {
    "burst": "strategies in turn, a few steps each",
    "abba": "strategies in alternating blocks (ABBA)",
    "single": "timed alone",
}


@dataclass(frozen=True)
class Row:
    """One case. Text is ready to show; the last four fields are numbers for the plots (None: no timing)."""

    strategy: str
    world: str
    batch: int
    context: int
    outcome: str
    unexpected: bool
    step: str
    step_interval: str
    ratio: str
    ratio_interval: str
    rate: str
    prefill: str
    collectives: str
    payload: str
    reads: str
    distance: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    log: str | None
    seconds: float | None
    interval: tuple[float, float] | None
    share: float | None
    share_interval: tuple[float, float] | None

    @property
    def setting(self) -> tuple[int, str, int, int]:
        """What is equal for the strategies that are compared with each other; sorts as the rows do."""
        count, _, backend = self.world.partition(" ")
        return int(count), backend, self.batch, self.context

    @property
    def setting_words(self) -> str:
        """The setting, in words."""
        return f"{ranks(self.world)}, batch {self.batch}, context {self.context}"

    @property
    def place(self) -> str:
        """Which case this is, in words."""
        return f"{self.strategy}, {self.setting_words}"


@dataclass(frozen=True)
class Section:
    """One model in one form (dtype, quantisation, cuts) with the cases measured on it."""

    title: str
    facts: tuple[str, ...]
    cuts: tuple[str, ...]
    warnings: tuple[str, ...]
    remarks: tuple[str, ...]
    findings: tuple[str, ...]
    rows: tuple[Row, ...]


def sections(records: Iterable[Mapping[str, Any]]) -> list[Section]:
    """Return the records as sections, in the order in which the models first appear.

    Missing fields are shown as not measured; nothing is filled in.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        key = (
            record.get("model") or record.get("model_type"),
            record.get("dtype"),
            str(record.get("quantization")),
            tuple(map(str, record.get("cuts") or ())),
        )
        groups.setdefault(key, []).append(record)
    return [_section(group) for group in groups.values()]


def tally(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many cases ended how, in words: "12 ok, 3 wrong (expected)"."""
    counts: dict[str, list[bool]] = {}
    for record in records:
        counts.setdefault(record["outcome"], []).append(_unexpected(record))
    parts = []
    for outcome, unexpected in counts.items():
        remark = " (expected)" if outcome != "ok" and outcome != "infeasible" and not any(unexpected) else ""
        parts.append(f"{len(unexpected)} {outcome}{remark}")
    return ", ".join(parts) or "no cases"


def ranks(world: str) -> str:
    """Return a world in words: "2 mpi" is "2 ranks (mpi)"."""
    count, _, backend = world.partition(" ")
    return "1 rank" if count == "1" else f"{count} ranks ({backend})"


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds with three to four significant digits."""
    if seconds is None:
        return NOT_MEASURED
    value = seconds * 1e3
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def size(count: float | None) -> str:
    """Return bytes with a decimal unit: 131072 is "131 kB"."""
    if count is None:
        return NOT_MEASURED
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB" if value < 999.5 else f"{value:.0f} TB"


def number(count: float) -> str:
    """Return a count with a decimal suffix: 134515008 is "135 M"."""
    value = float(count)
    for suffix in ("", " k", " M", " G"):
        if value < 999.5:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g} T"


def _section(records: list[Mapping[str, Any]]) -> Section:
    first = records[0]
    order = {
        strategy: rank for rank, strategy in enumerate(dict.fromkeys(_text(r, "strategy") for r in records))
    }
    ranked = sorted(records, key=lambda r: (_setting(r), order[_text(r, "strategy")]))
    references: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for record in sorted(records, key=lambda r: order[_text(r, "strategy")]):
        if record["outcome"] == "ok" and record.get("seconds_per_step") is not None:
            references.setdefault(_setting(record), record)
    facts = [str(first[name]) for name in ("family", "dtype", "quantization") if first.get(name)]
    if first.get("model_type") and first.get("model_type") != first.get("family"):
        facts.insert(0, str(first["model_type"]))
    if first.get("parameters"):
        facts.append(f"{number(first['parameters'])} parameters")
    ways = dict.fromkeys(r.get("interleaving") for r in records if r.get("interleaving"))
    facts += [INTERLEAVING.get(str(way), str(way)) for way in ways]
    return Section(
        title=str(first.get("model") or first.get("model_type") or "model"),
        facts=tuple(facts),
        cuts=tuple(str(cut) for cut in first.get("cuts") or ()),
        warnings=tuple(_launcher_warnings(records)),
        remarks=tuple(_outlier_remarks(records)),
        findings=tuple(_findings(ranked, references)),
        rows=tuple(_row(record, references.get(_setting(record))) for record in ranked),
    )


def _row(record: Mapping[str, Any], reference: Mapping[str, Any] | None) -> Row:
    seconds = record.get("seconds_per_step") if record["outcome"] == "ok" else None
    interval = record.get("seconds_per_step_interval") if seconds is not None else None
    share, share_interval = (
        _share(record, reference) if seconds is not None and reference is not None else (None, None)
    )
    shown = f"{share_interval[0]:.2f}–{share_interval[1]:.2f}" if share_interval else ""
    rate = record.get("decode_tokens_per_second") if seconds is not None else None
    collectives = record.get("collectives_per_token") or {}
    count = int(record.get("ranks") or 1)
    return Row(
        strategy=_text(record, "strategy"),
        world="1" if count == 1 else f"{count} {record.get('backend') or 'none'}",
        batch=int(record.get("batch") or 1),
        context=int(record.get("context") or 0),
        outcome=record["outcome"],
        unexpected=_unexpected(record),
        step=milliseconds(seconds),
        step_interval=f"{milliseconds(interval[0])}–{milliseconds(interval[1])}" if interval else "",
        ratio=NOT_MEASURED if share is None else "1" if record is reference else f"{share:.2f}",
        ratio_interval="reference" if share is not None and record is reference else shown,
        rate=NOT_MEASURED if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}",
        prefill=milliseconds(record.get("prefill_seconds") if seconds is not None else None),
        collectives=", ".join(f"{count} {name}" for name, count in collectives.items() if count)
        or NOT_MEASURED,
        payload=size(record.get("bytes_per_token")),
        reads=_spread(record.get("weight_bytes_read_per_token")),
        distance=_distance(record),
        reasons=tuple(str(reason) for reason in record.get("reasons") or ()),
        notes=tuple(_row_notes(record)),
        log=record.get("log"),
        seconds=seconds,
        interval=(interval[0], interval[1]) if interval else None,
        share=share,
        share_interval=share_interval,
    )


def _share(
    record: Mapping[str, Any], reference: Mapping[str, Any]
) -> tuple[float | None, tuple[float, float] | None]:
    """Return how long the case's step takes as a share of the reference's, and the interval of that."""
    if record is reference:
        return 1.0, None
    found = _compare(record, reference)
    if found is None:
        return record["seconds_per_step"] / reference["seconds_per_step"], None
    return found.value, found.interval


def _side_by_side(record: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """Whether two cases took turns in one launch, so that their i-th steps belong together."""
    return record.get("interleaving") == reference.get("interleaving") == "burst" and record.get(
        "log"
    ) == reference.get("log")


def _compare(record: Mapping[str, Any], reference: Mapping[str, Any]) -> statistics.Ratio | None:
    """Compare two cases by their samples; None when either has kept none."""
    mine, theirs = ((r.get("samples") or {}).get("decode") or [] for r in (record, reference))
    try:
        return statistics.ratio(mine, theirs, interleaved=_side_by_side(record, reference))
    except (ValueError, TypeError):
        return None


def _findings(
    ranked: list[Mapping[str, Any]], references: Mapping[tuple[Any, ...], Mapping[str, Any]]
) -> list[str]:
    """Return one sentence a setting: which strategy is fastest, by how much, and whether that can be told."""
    found = []
    alone = {_setting(r)[2:]: r for r in references.values() if _setting(r)[0] == 1}
    for setting in dict.fromkeys(map(_setting, ranked)):
        timed = [
            r for r in ranked if _setting(r) == setting and r["outcome"] == "ok" and r.get("seconds_per_step")
        ]
        timed.sort(key=lambda r: r["seconds_per_step"])
        count, backend, batch, context = setting
        where = f"{ranks(f'{count} {backend}')}, batch {batch}, context {context}"
        one = alone.get((batch, context))
        if timed and count > 1 and one is not None:
            speedup = one["seconds_per_step"] / timed[0]["seconds_per_step"]
            found.append(f"{where}: {timed[0]['strategy']} is {speedup:.2f} times as fast as one rank.")
        if len(timed) < 2:
            continue
        best, second = timed[:2]
        comparison = _compare(second, best)
        step = milliseconds(best["seconds_per_step"])
        lead = f"{where}: {best['strategy']} is fastest of {len(timed)}, {step} ms a step"
        if comparison is None or comparison.separable is None:
            found.append(f"{lead}; too few samples to tell it from {second['strategy']}.")
        elif comparison.separable:
            found.append(f"{lead}; {second['strategy']} takes {comparison.value:.2f} times as long.")
        else:
            found.append(
                f"{lead}, but {second['strategy']} can't be told from it ({comparison.value:.2f} times)."
            )
    return found


LAUNCHER_SHARE = 0.05
"""Of one core: a launcher that takes less than this while ranks are timed is left unmentioned."""


def _launcher_warnings(records: list[Mapping[str, Any]]) -> list[str]:
    shares = []
    for record in records:
        launcher = record.get("launcher") or {}
        used, seconds = launcher.get("cpu_seconds"), launcher.get("seconds")
        if used is not None and seconds and used / seconds > LAUNCHER_SHARE:
            shares.append(used / seconds)
    if not shares:
        return []
    return [
        f"the launcher, mlx.launch, took up to {max(shares):.0%} of a core while {len(shares)} of these cases were timed"
    ]


def _outlier_remarks(records: list[Mapping[str, Any]]) -> list[str]:
    far = taken = 0
    for record in records:
        with contextlib.suppress(ValueError, TypeError):
            figures = statistics.summary((record.get("samples") or {}).get("decode") or [])
            far, taken = far + figures.outliers, taken + figures.n
    if not far:
        return []
    return [f"{far} of {taken} steps took far longer or shorter than their median; none was dropped"]


def _row_notes(record: Mapping[str, Any]) -> list[str]:
    found = []
    samples = (record.get("samples") or {}).get("decode") or []
    if record["outcome"] == "ok" and samples:
        try:
            figures = statistics.summary(samples)
        except (ValueError, TypeError):
            found.append("its samples are not all positive numbers")
        else:
            found += figures.notes
    found += [f"{name} was {value}" for name, value in (record.get("nonfinite") or {}).items()]
    if (record.get("equivalence") or {}).get("ranks_agree") is False:
        found.append("the ranks did not agree with each other")
    return found


def _distance(record: Mapping[str, Any]) -> str:
    equivalence = record.get("equivalence") or {}
    tolerance = equivalence.get("tolerance")
    if not equivalence or tolerance is None:
        return NOT_MEASURED
    distance = equivalence.get("relative_diff")
    shown = (record.get("nonfinite") or {}).get("equivalence.relative_diff", NOT_MEASURED)
    return f"{f'{distance:.1e}' if distance is not None else shown} / {tolerance:.1e}"


def _spread(counts: Sequence[float] | None) -> str:
    """Return the bytes of one rank, or from the smallest to the largest where the ranks differ."""
    if not counts:
        return NOT_MEASURED
    low, high = size(min(counts)), size(max(counts))
    return low if low == high else f"{low}–{high}"


def _unexpected(record: Mapping[str, Any]) -> bool:
    """Whether a case did not end as its sweep said; a case that is infeasible is a finding, not a surprise."""
    expect = record.get("expect") or "ok"
    return record["outcome"] != expect and not (record["outcome"] == "infeasible" and expect == "ok")


def _setting(record: Mapping[str, Any]) -> tuple[int, str, int, int]:
    return (
        int(record.get("ranks") or 1),
        str(record.get("backend") or ""),
        int(record.get("batch") or 1),
        int(record.get("context") or 0),
    )


def _text(record: Mapping[str, Any], name: str) -> str:
    return str(record.get(name) or "?")
