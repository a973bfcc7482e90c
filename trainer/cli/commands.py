"""The commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer import __version__, codes, log
from trainer.cli import launching
from trainer.cli.environment import Texts, read_environment
from trainer.cli.options import with_settings
from trainer.cli.pages import checkpoints_page, config_page, launch_page, settings_page
from trainer.cli.ranks import describe_error
from trainer.cli.resolved import Job, Resolved
from trainer.cli.streams import flush, mend_streams
from trainer.codes import TrainerError

app = typer.Typer(
    name="trainer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train image classifiers with DistributedDataParallel, on one CPU or on many nodes, from the same command.",
    epilog="Every option is also the variable TRAINER_<OPTION> and a key of a .env file: --lr is TRAINER_LR. "
    "Command line before environment before .env file before default.",
)


def _show_version(value: bool) -> None:
    if value:
        _print(f"trainer {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, metavar="", help="Show the version and end."),
    ] = False,
    local_rank: Annotated[str | None, typer.Option("--local-rank", "--local_rank", hidden=True)] = None,
) -> None:
    pass


@app.command(
    help="Train a model: on every visible device of this machine, or as the launcher says that is found in the environment."
)
@with_settings
def train(resolved: Resolved) -> int:
    """Train a model."""
    return launching.dispatch(Job(resolved, "train"))


@app.command(
    "eval",
    help="Evaluate a checkpoint, or a run's newest, on its test set. What the checkpoint says about the experiment holds; other options apply.",
)
@with_settings
def evaluate(
    resolved: Resolved,
    target: Annotated[Path, typer.Argument(metavar="CHECKPOINT_OR_RUN", help="A checkpoint's or a run's folder.")],
) -> int:
    """Evaluate a checkpoint."""
    return launching.dispatch(Job(resolved, "eval", target))


@app.command(
    help="Put data and first weights in place, as train would with the same options, and say what is there. Starts no ranks."
)
@with_settings
def prepare(resolved: Resolved) -> int:
    """Put data and first weights in place."""
    return launching.run_alone(Job(resolved, "prepare"))


@app.command(help="List a run's checkpoints: step, time, size, whether it is valid, which is the best. Reads them all.")
def checkpoints(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> int:
    """List a run's checkpoints."""
    _print(checkpoints_page(run))
    return codes.OK


@app.command("config", help="Show every setting, its value, and where it came from.")
@with_settings
def show_config(
    resolved: Resolved,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference page of all settings instead (docs/settings.md).")
    ] = False,
) -> int:
    """Show every setting."""
    for line in resolved.warnings:
        log.warning(line)
    _print(settings_page() if reference else config_page(resolved))
    return codes.OK


@app.command(
    "launch",
    help="Show what is found in this environment: launcher, nodes, ranks, device, threads, address, and from which variables. Starts nothing.",
)
@with_settings
def show_launch(resolved: Resolved) -> int:
    """Show what was discovered."""
    _print(launch_page(resolved))
    return codes.OK


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; every error that a person can cause is one line."""
    mend_streams()
    log.setup("text")
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    flush()
    return code


def _run(args: list[str]) -> int:
    try:
        # Not standalone: usage errors come out as exceptions, and are one line here instead of a box.
        command = typer.main.get_command(app)
        code: Any = command.main(args=args, prog_name="trainer", standalone_mode=False, obj=_clean_environment())
    except TrainerError as error:
        log.error(str(error))
        return error.code
    except KeyboardInterrupt:
        return codes.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last door: whatever it is, it becomes an exit code
        return _usage_error(error)
    return code if isinstance(code, int) else codes.OK


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        log.discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # `trainer config | head -1` is fine
            raise TrainerError(f"the output cannot be written: {error.strerror}") from error


def _usage_error(error: Exception) -> int:
    # typer brings its own parser, whose exceptions are known by what they offer.
    tell = getattr(error, "format_message", None)
    if tell is None:
        if type(error).__name__ == "Abort":
            return codes.INTERRUPTED
        log.failure(f"unexpected {describe_error(error)}")
        return codes.UNEXPECTED
    if type(error).__name__ == "NoArgsIsHelpError":
        return codes.SETTING  # the help has been printed
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "trainer"
    log.error(f"{' '.join(tell().split())} See `{path} --help`.")
    return codes.SETTING


def _clean_environment() -> Texts:
    """Leave in os.environ only what the parser may read as settings, in the form that it reads."""
    found = read_environment(os.environ)
    for name in found.dropped:
        del os.environ[name]
    for name, text in found.values.items():
        os.environ[f"TRAINER_{name.upper()}"] = text
    return found
