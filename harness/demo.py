"""`make run`: the main job on this machine, from real weights to a page of results, in minutes.

    python -m harness.demo

Converts SmolLM2-135M-Instruct, lets three ranks answer a question with it, then runs `harness/demo.toml`:
every strategy of two models, checked against one rank and timed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from harness import answer, cli, commands, smollm
from harness.errors import UsageError
from harness.request import expand, read_sweep
from harness.terminal import console
from sharding import rows, strategies
from sharding.errors import BadRequest
from sharding.source import Source

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"


def _refusal(out: Console, model: Source) -> None:
    """Say why two ranks can't share this model."""
    tensor = strategies.resolve("tensor", model.model_type)
    row = rows.make_rows(model, [tensor], [2], [1], [64])[0]
    out.print(f"{model.label} on 2 ranks: {'legal' if row.valid else 'refused'}", soft_wrap=True)
    for reason in row.reasons:
        out.print(f"  {reason}", soft_wrap=True)


def main() -> int:
    """Run the demonstration; the exit status is that of `shardbench run`."""
    out = console()
    try:
        out.print(
            "converting SmolLM2-135M-Instruct (real weights, 4 bits) to an mlx checkpoint", soft_wrap=True
        )
        folder = smollm.ensure(ROOT / ".cache" / "SmolLM2-135M-Instruct")
        sweep = read_sweep(ROOT / "harness" / "demo.toml")
        models = [model.resolve(ROOT / "harness") for model in sweep.models]
        _refusal(out, models[0])
        said = answer.ask(folder, QUESTION, ranks=3)
        out.print(f"3 ranks, asked “{QUESTION}”: {said}", soft_wrap=True)
        cases = expand(sweep, models)
        out.print(
            f"{len(cases)} cases: check each against one rank, time those that are right", soft_wrap=True
        )
        status = commands.execute(sweep, models, cases, None, None, ROOT / "results", note="make run")
    except answer.NoAnswer as error:
        return cli.complain(str(error), status=1)
    except (UsageError, BadRequest) as error:
        return cli.complain(str(error))
    except OSError as error:
        return cli.complain(f"{error.filename or 'a file'}: {error.strerror or error}", status=1)
    except KeyboardInterrupt:
        return cli.complain("interrupted", status=130)
    if status == 0:
        out.print(
            "next: shardbench plan YOUR-config.json --ranks 2,4,8   ·   shardbench verify --help   ·   README.md",
            soft_wrap=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
