"""The table and the page: every case is there, no figure of a wrong one is, and nothing comes from elsewhere."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import plots, report, rows
from harness.errors import UsageError
from harness.runs import RunStore
from tests.harness.results_samples import environment, record, records

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart: its tags, attributes and text; fails on a tag that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        """All that a reader sees."""
        return " ".join(text for text in self.texts if text)


def make(folder: Path, items: list[dict[str, Any]], **changes: Any) -> RunStore:
    """Make a run with the records `items`."""
    with RunStore.create(folder, {"strategies": ["tensor"]}, environment(**changes)) as run:
        for item in items:
            run.append(item)
    return run


def page_of(run: RunStore) -> tuple[str, Page]:
    """Write the page of one run into its folder and return it, as text and taken apart."""
    text = report.write_page([run], run.path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def printed(items: list[dict[str, Any]], width: int = 200) -> str:
    """Return the terminal report as plain text."""
    stream = io.StringIO()
    report.terminal(items, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, Page]:
    """The page of the synthetic run."""
    return page_of(make(tmp_path_factory.mktemp("page"), records(), blas={"name": "reference"}))


def test_the_page_needs_nothing_but_itself(whole):
    """No script, no link, image, font or style from elsewhere, and a policy that would block them."""
    text, page = whole
    assert "://" not in text
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}
    assert not re.search(r"url\((?!#)|@import", text)
    assert not [
        value for _, attributes in page.tags for name, value in attributes.items() if name.startswith("on")
    ]
    policy = [a for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in str(policy[0]["content"])


def test_the_page_is_for_phones_and_for_the_dark(whole):
    """It takes the width of the screen, says its colours for both schemes, and has a layout for small screens."""
    text, page = whole
    assert any(
        a.get("name") == "viewport" and "width=device-width" in str(a["content"]) for _, a in page.tags
    )
    assert "prefers-color-scheme: dark" in text
    assert re.search(r"@media \(max-width", text)


def test_every_case_is_on_the_page_with_its_reason(whole):
    """Each record has a row; those that are not ok have their reason in words, and every outcome is shown."""
    _, page = whole
    heads = [a for tag, a in page.tags if tag == "th" and a.get("scope") == "row"]
    assert len(heads) == len(records())
    for one in records():
        assert one["strategy"] in page.text
        assert one["outcome"] in page.text
        assert all(reason in page.text for reason in one["reasons"])


def test_cuts_stand_beside_the_numbers(whole):
    """What was cut from a model is in its section, before its table."""
    text, page = whole
    for cut in records()[0]["cuts"]:
        assert cut.replace("->", "→") in page.text
    section = text.index("<h2>DeepSeek-V4-Flash")
    assert section < text.index("num_hidden_layers 43", section) < text.index("<table", section)


def test_conditions_and_what_they_mean_are_on_the_page(whole):
    """Machine, versions and settings are listed; a condition that spoils the comparison is said in words."""
    _, page = whole
    for fact in (
        "Apple M3 Ultra",
        "mlx 0.32.4",
        "MLX_METAL_FAST_SYNCH=1",
        "reference BLAS",
        "batching saves nothing",
    ):
        assert fact in page.text


def test_a_surprise_is_marked_and_an_expected_failure_is_not(whole):
    """A case that ended otherwise than its sweep expected is named on top; an expected `wrong` is not."""
    _, page = whole
    assert "Not as expected: my_shard:shard" in page.text
    assert "Not as expected: upstream" not in page.text
    assert "3 wrong (expected)" in page.text


def test_plots_are_drawn_and_described(whole):
    """Each plot is a well-formed inline drawing with a description, in the colours of the page."""
    text, _ = whole
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert "DeepSeek-V4-Flash" in root.attrib["aria-label"]
        assert "var(--ink)" in drawing
        assert "var(--s0)" in drawing
        assert not re.search(r"#[0-9a-fA-F]{6}", drawing)
        assert "width" not in root.attrib


def test_a_wrong_case_shows_no_timing(tmp_path):
    """Even a record that carries a time, as another program may have written, shows none unless it is ok."""
    bad = record(outcome="wrong", reasons=["differs"])
    assert bad["seconds_per_step"] is not None
    (row,) = rows.sections([bad])[0].rows
    assert (row.step, row.ratio, row.rate, row.prefill) == (rows.NOT_MEASURED,) * 4
    assert row.seconds is None
    assert rows.milliseconds(bad["seconds_per_step"]) not in printed([bad])


def test_names_from_files_are_text_and_nothing_else(tmp_path):
    """Markup, mathematics and control of the terminal in names and reasons come out as what they are."""
    evil = '<script>alert(1)</script> $x^2$ [bold]b[/bold] {{ 7*7 }} _y & "q"'
    items = [
        record(strategy=evil, case=str(b), batch=b, model=evil, reasons=[evil], log="logs/x.log")
        for b in (1, 4)
    ]
    items += [record(strategy="_hidden", case=f"h{b}", batch=b, model=evil) for b in (1, 4)]
    text, page = page_of(make(tmp_path, items, machine={"name": evil, "chip": evil}))
    assert "<script" not in text
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert evil in page.text
    assert "49" not in page.text.split("{{")[0][-5:]
    assert evil in printed(items, width=400)
    assert len(re.findall(r"<svg", text)) == 2


def test_a_record_of_another_version_is_shown_as_far_as_it_goes(tmp_path):
    """Missing optional fields are shown as not measured, unknown ones disturb nothing."""
    bare = {"case": "a", "outcome": "ok", "strategy": "tensor", "unknown": {"x": 1}}
    odd = {
        "case": "b",
        "outcome": "ok",
        "seconds_per_step": 0.5,
        "samples": {"decode": []},
        "equivalence": {},
    }
    _, page = page_of(make(tmp_path, [bare, odd]))
    assert "500.0" in page.text
    assert "500.0" in printed([bare, odd])
    assert "tensor" in printed([bare])


def test_a_run_without_records_has_a_page(tmp_path):
    """A run that was cut off before its first case ended is shown as such."""
    _, page = page_of(make(tmp_path, []))
    assert "no records yet" in page.text
    assert printed([]) == ""


def test_several_runs_share_a_page(tmp_path):
    """Each run has its part, and the page begins with links to them."""
    runs = [make(tmp_path, records()[:2]), make(tmp_path, records()[2:4])]
    page = Page(report.write_page(runs, tmp_path / "both.html").read_text())
    links = [a["href"] for tag, a in page.tags if tag == "a" and str(a.get("href")).startswith("#")]
    assert links == ["#run-1", "#run-2"]
    assert {a["id"] for tag, a in page.tags if tag == "article"} == {"run-1", "run-2"}


def test_a_log_is_linked_when_it_is_there(tmp_path):
    """The link of a failed case is relative and leads to a file; without the file there is no link."""
    bad = next(one for one in records() if one["outcome"] == "crashed")
    run = make(tmp_path, [bad])
    assert not [a for tag, a in page_of(run)[1].tags if tag == "a"]
    (run.logs / "rank-0.log").write_text("Traceback")
    (link,) = [a["href"] for tag, a in page_of(run)[1].tags if tag == "a"]
    assert (run.path / str(link)).is_file()
    elsewhere = Page(report.write_page([run], tmp_path / "deep" / "er" / "page.html").read_text())
    (link,) = [a["href"] for tag, a in elsewhere.tags if tag == "a"]
    assert (tmp_path / "deep" / "er" / str(link)).resolve().is_file()


def test_the_same_run_gives_the_same_page(tmp_path):
    """Writing a report again changes no byte."""
    run = make(tmp_path, records())
    assert page_of(run)[0] == page_of(run)[0]


def test_a_page_that_cant_be_written_is_told(tmp_path):
    """No run, or a target that can't be written, is one line and leaves nothing."""
    with pytest.raises(UsageError, match="at least one run"):
        report.write_page([], tmp_path / "page.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't write the page"):
        report.write_page([make(tmp_path, [])], tmp_path / "file" / "page.html")


def test_the_ratio_is_to_the_first_strategy_that_was_ok():
    """A wrong first strategy is no reference; each setting of ranks and batch has its own."""
    items = [
        record(strategy="first", case="1", outcome="wrong", seconds_per_step=None),
        record(strategy="second", case="2", seconds_per_step=0.1, samples={}),
        record(strategy="third", case="3", seconds_per_step=0.15, samples={}),
        record(strategy="third", case="4", seconds_per_step=0.3, samples={}, batch=4),
    ]
    found = [(row.strategy, row.batch, row.ratio, row.ratio_interval) for row in rows.sections(items)[0].rows]
    assert found == [
        ("first", 1, rows.NOT_MEASURED, ""),
        ("second", 1, "1", "reference"),
        ("third", 1, "1.50", ""),
        ("third", 4, "1", "reference"),
    ]


def test_strategies_that_cant_be_told_apart_are_not_ranked():
    """A difference inside the noise is called that; a clear one is stated as a factor; few samples say so."""
    base = record()["samples"]["decode"]

    def versus(decode: list[float]) -> str:
        other = record(
            strategy="other",
            case="o",
            samples={"decode": decode},
            seconds_per_step=sorted(decode)[len(decode) // 2],
        )
        return rows.sections([record(), other])[0].findings[0]

    assert "can't be told" in versus(
        [value * (1.0005 if i % 2 else 0.9996) for i, value in enumerate(base)][::-1]
    )
    assert "takes 1.20 times as long" in versus([value * 1.2 for value in base])
    assert "too few samples" in versus([0.07, 0.07])


def test_more_ranks_are_compared_with_one():
    """Where the unsharded model was measured too, the fastest strategy's speed-up over it is stated."""
    (smol,) = (section for section in rows.sections(records()) if section.title.startswith("SmolLM2"))
    assert any("times as fast as one rank" in finding for finding in smol.findings)


def test_a_launcher_that_takes_a_core_is_said():
    """A core that mlx.launch took from the ranks while they were timed stands beside the numbers, an idle one does not."""
    busy = record(launcher={"cpu_seconds": 9.0, "seconds": 10.0, "stopped": False})
    idle = record(launcher={"cpu_seconds": 0.01, "seconds": 10.0, "stopped": False})
    assert "mlx.launch, took up to 90% of a core" in rows.sections([busy])[0].warnings[0]
    assert not rows.sections([idle])[0].warnings


def test_a_distance_that_was_no_number_is_shown_as_it_was():
    """NaN instead of logits is not shown as not measured."""
    item = record(
        outcome="wrong",
        equivalence={"relative_diff": None, "tolerance": 4.1e-5},
        nonfinite={"equivalence.relative_diff": "nan"},
    )
    (row,) = rows.sections([item])[0].rows
    assert row.distance == "nan / 4.1e-05"
    assert "equivalence.relative_diff was nan" in row.notes


def test_an_unsteady_measurement_is_called_that():
    """Samples that drift carry the note beside their row."""
    decode = [0.05 * (1 + 0.02 * step) for step in range(24)]
    (row,) = rows.sections([record(samples={"decode": decode})])[0].rows
    assert any("drifting" in note for note in row.notes)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_the_table_fits_the_terminal(width):
    """No line is wider than the terminal in the tables, no name is cut, and what is left out is named."""
    text = printed(records(), width)
    table = [
        line for line in text.splitlines() if line.strip().startswith(("tensor", "replicated", "gathered"))
    ]
    assert len(table) == 14 + 4
    assert sum("replicated-wo_b-late" in line for line in table) == 3
    if width >= 60:
        assert max(map(len, text.splitlines())) <= width
    # In the heading, or among what was left out.
    assert all(name in " ".join(text.split()) for name in ("distance / tolerance", "tokens/s"))


def test_many_reasons_are_said_once_and_in_part():
    """The batches that share their reasons share the lines, and of a long list the terminal has the first and the number."""
    reasons = [f"layer {number} does not divide" for number in range(9)]
    refused = {"outcome": "infeasible", "reasons": reasons, "seconds_per_step": None}
    text = printed([record(case=str(batch), batch=batch, **refused) for batch in (1, 4)])
    assert text.count("layer 0 does not divide") == 1
    assert "batch 1, 4: layer 0" in text
    assert "layer 3" not in text
    assert "and 6 more" in text


def test_eighty_columns_hold_what_decides():
    """In a plain terminal strategy, outcome, time, ratio, collectives, bytes and weights read are all there."""
    text = printed(records(), 80)
    heading = next(line for line in text.splitlines() if line.startswith("strategy"))
    for name in ("outcome", "ms/step", "ratio", "collectives", "bytes", "read"):
        assert name in heading
    assert "2 ranks (mpi), batch 16, context 64" in text


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (131072, "131 kB"), (4.2e15, "4200 TB"), (None, "–")],
)
def test_sizes_are_short_and_right(count, shown):
    """Bytes are shown with three digits and a decimal unit."""
    assert rows.size(count) == shown


def test_a_strategy_looks_the_same_in_every_plot():
    """Colour and marker belong to the strategy, also where others are missing."""
    styles = plots.style_of(["a", "b", "a", "c"])
    assert styles == {"a": 0, "b": 1, "c": 2}
    (section,) = rows.sections([record(strategy="c", case=str(b), batch=b) for b in (1, 4)])
    drawing = plots.step_plot(section.rows, styles, "title")
    assert drawing is not None
    assert "var(--s2)" in drawing
    assert "var(--s0)" not in drawing


def test_nothing_timed_is_no_plot():
    """Without a timing there is nothing to draw, and one batch has no share by batch."""
    (section,) = rows.sections([record(outcome="hung", seconds_per_step=None)])
    assert plots.step_plot(section.rows, {"tensor": 0}, "t") is None
    (section,) = rows.sections([record()])
    assert plots.share_plot(section.rows, {"tensor": 0}, "t") is None
