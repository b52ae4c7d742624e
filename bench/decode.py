"""Seconds per decode step of the whole batch, by strategy, world (ranks and backend), batch and context.

The classes come from results/series.jsonl, which each `shardbench run` extends: see harness/series.py.
"""

from bench import ROOT
from harness import series

globals().update(series.benchmark_classes("decode", ROOT / "results"))
