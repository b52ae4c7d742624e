"""`shardbench`: the one command. Each subcommand reads its options, calls the library, and prints.

Exit status: 0 all well; 1 the thing asked about failed; 2 the request can't be understood or is refused.
With `--json` stdout holds the answer and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click

from harness.errors import Unreachable, UsageError
from sharding.errors import BadRequest, Rejected

DEBUG = "SHARDBENCH_DEBUG"
EXAMPLES = {
    "plan": "shardbench plan config.json --ranks 2,4,8",
    "verify": "shardbench verify config.json --strategy tensor --ranks 2",
    "run": "shardbench run config.json --strategy tensor,upstream --ranks 2 --batch 1,16",
}


class Numbers(click.ParamType):
    """Comma-separated positive whole numbers: `2,4,8`."""

    name = "N[,N]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse, or fail with the offending part."""
        if isinstance(value, tuple):
            return value
        numbers = []
        for part in str(value).split(","):
            try:
                number = int(part)
            except ValueError:
                number = 0
            if number < 1:
                self.fail(
                    f"{part!r} is not a whole number of at least 1; give N[,N...] such as 2,4", param, ctx
                )
            numbers.append(number)
        return tuple(dict.fromkeys(numbers))


class Names(click.ParamType):
    """Comma-separated names."""

    name = "S[,S]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Split and drop repetitions."""
        if isinstance(value, tuple):
            return value
        names = [part.strip() for part in str(value).split(",")]
        if not all(names):
            self.fail(f"{value!r} has an empty name in it; give S[,S...]", param, ctx)
        return tuple(dict.fromkeys(names))


class Size(click.ParamType):
    """A memory size: `128GB`, `96GiB`, `500MB`; a bare number is GiB."""

    name = "SIZE"
    units: ClassVar = {"": 2**30, "GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        text = str(value).strip().upper()
        unit = text.lstrip("0123456789.")
        try:
            size = int(float(text.removesuffix(unit)) * self.units[unit.strip()])
        except (ValueError, KeyError, OverflowError):
            size = 0
        if size <= 0:
            self.fail(f"{value!r} is not a memory size; give one such as 128GB or 96GiB", param, ctx)
        return size


class Seconds(click.FloatRange):
    """At least one second, and an end to it."""

    name = "SECONDS"

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse, or fail on what is no length of time."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


NUMBERS, NAMES, SIZE, SECONDS = Numbers(), Names(), Size(), Seconds()
POSITIVE = click.IntRange(min=1)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that change what SOURCE means."""
    for option in reversed(
        (
            click.option(
                "--set", "sets", metavar="KEY=VALUE", multiple=True, help="Override a field of the config."
            ),
            click.option("--layers", type=POSITIVE, help="Keep so many layers, of every kind the model has."),
            click.option(
                "--quantize", metavar="Q", help="Quantise float weights: 4bit, 8bit, mxfp4 or mxfp8."
            ),
            click.option(
                "--dtype", help="Dtype of activations. [default: the checkpoint's; float32 on a CPU]"
            ),
            click.option(
                "--seed", type=click.IntRange(min=0), default=0, help="Seed of random weights and prompts."
            ),
        )
    ):
        command = option(command)
    return command


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there."
    )(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="shardbench")
def shardbench() -> None:
    """Check, verify and time how a language model is split over several Macs with MLX.

    SOURCE is a checkpoint folder, a Hugging Face repo id, or a config.json (random weights).
    """


@shardbench.command(epilog=f"Example: {EXAMPLES['plan']}")
@click.argument("source")
@model_options
@click.option("--ranks", type=NUMBERS, default="2", show_default=True, help="World sizes.")
@click.option("--strategy", type=NAMES, help="Strategies. [default: all that the model's family has]")
@click.option("--batch", type=NUMBERS, default="1", show_default=True, help="Sequences decoded at once.")
@click.option("--context", type=NUMBERS, default="1024", show_default=True, help="Tokens in the cache.")
@click.option("--memory", type=SIZE, help="Memory of one host, such as 128GB. [default: this machine's]")
@json_option
def plan(**options: Any) -> int:
    """May SOURCE be split this way, and what would it cost? No weights are touched."""
    from harness import commands

    return commands.plan(**options)


@shardbench.command(epilog=f"Example: {EXAMPLES['verify']}")
@click.argument("source")
@model_options
@click.option("--strategy", required=True, help="A built-in name, upstream, or package.module:function.")
@click.option("--ranks", type=POSITIVE, required=True, help="World size.")
@click.option("--batch", type=POSITIVE, default=2, show_default=True)
@click.option("--prompt-tokens", type=POSITIVE, default=37, show_default=True)
@click.option("--decode-tokens", type=POSITIVE, default=12, show_default=True)
@click.option(
    "--prompt", help="Text of the prompt, through the checkpoint's tokenizer. [default: random ids]"
)
@click.option("--backend", type=click.Choice(["mpi", "ring"]), default="mpi", show_default=True)
@click.option("--deadline", type=SECONDS, default=3600.0, help="Seconds that the job may take.")
@click.option(
    "--stall",
    type=SECONDS,
    default=300.0,
    help="Seconds without progress after which a rank is hung.",
)
@click.option("--keep-logs", type=click.Path(path_type=Path), help="Keep the job's logs in this folder.")
@json_option
def verify(**options: Any) -> int:
    """Does the split model compute what one rank computes? Runs real ranks on this machine."""
    from harness import commands

    return commands.verify(**options)


@shardbench.command(epilog=f"Example: {EXAMPLES['run']}")
@click.argument("source", required=False)
@model_options
@click.option("--strategy", type=NAMES, help="Strategies. [default: all that the model's family has]")
@click.option("--ranks", type=NUMBERS, default="1,2", show_default=True, help="World sizes.")
@click.option("--backend", type=NAMES, default="mpi", show_default=True, help="mpi, ring.")
@click.option("--batch", type=NUMBERS, default="1", show_default=True, help="Sequences decoded at once.")
@click.option(
    "--context", type=NUMBERS, default="64", show_default=True, help="Prompt tokens of each sequence."
)
@click.option("--steps", type=POSITIVE, help="Measured decode steps of each case.")
@click.option(
    "--prompt", help="Text of the prompts, through the checkpoint's tokenizer. [default: random ids]"
)
@click.option("--expect", metavar="STRATEGY=OUTCOME", multiple=True, help="Outcome that counts as success.")
@click.option("--deadline", type=SECONDS, help="Seconds that one job may take.")
@click.option("--stall", type=SECONDS, help="Seconds without progress after which a rank is hung.")
@click.option("--cluster", type=click.Path(path_type=Path), help="cluster.toml, or an mlx host file.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option("--resume", metavar="RUN", help="Continue a run that was cut off.")
@json_option
def run(**options: Any) -> int:
    """Check every case of a sweep, time those that are right, and record all of them.

    SOURCE is a model, or a SWEEP.toml that names models, strategies, ranks, batches and contexts.
    """
    from harness import commands

    context = click.get_current_context()
    written = click.core.ParameterSource.COMMANDLINE
    given = frozenset(name for name in options if context.get_parameter_source(name) is written)
    return commands.run(**options, given=given)


@shardbench.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@model_options
def synth(**options: Any) -> int:
    """Write a checkpoint of SOURCE with random weights to the new folder OUT."""
    from harness import commands

    return commands.synth(**options)


@shardbench.command()
@click.argument("runs", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option(
    "--page", type=click.Path(path_type=Path), help="File to write. [default: report.html in the run]"
)
@json_option
def report(**options: Any) -> int:
    """Show the table of RUNS (ids or folders; by default the latest) and write their page."""
    from harness import commands

    return commands.report(**options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit status."""
    try:
        status = shardbench.main(args=arguments, prog_name="shardbench", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        where = (
            f" {error.ctx.command_path.removeprefix('shardbench ')}" if error.ctx and error.ctx.parent else ""
        )
        return complain(f"{error.format_message()} (see shardbench{where} --help)")
    except (UsageError, BadRequest, Rejected) as error:
        return complain(str(error))
    except Unreachable as error:
        return complain(str(error), status=1)
    except (KeyboardInterrupt, click.exceptions.Abort):
        return complain("interrupted", status=130)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:  # Nothing that a user can do should lead here.
        if os.environ.get(DEBUG):
            raise
        return complain(
            f"internal error, please report it: {type(error).__name__}: {error} ({DEBUG}=1 shows where)",
            status=1,
        )


def complain(message: str, status: int = 2) -> int:
    """One line on stderr."""
    click.echo(f"shardbench: {' '.join(message.split())}", err=True)
    return status


def option_name(parameter: str) -> str:
    """How a parameter of the current command is written."""
    return next(
        (p.opts[0] for p in click.get_current_context().command.params if p.name == parameter), parameter
    )


def print_json(value: Any) -> None:
    """The answer, on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())
