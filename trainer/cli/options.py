"""Command-line options made from the settings table, and the Config that comes out with the source of each value.

Precedence is typer's own: command line, environment, default map (the .env files), default.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer.cli.environment import Texts, read_files
from trainer.cli.resolved import Resolved
from trainer.config import Setting, build, parse, settings

_WORKING_FILE = Path(".env")
MOST_METAVAR = 9  # characters; a wider column would cut the names of the options
_METAVARS = {int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT", bool: ""}


def _option(item: Setting) -> inspect.Parameter:
    flags = f"{item.flag}/--no-{item.flag[2:]}" if item.kind is bool else item.flag
    default = str(item.default).lower() if item.kind is bool else str(item.default)
    words = "" if item.default is None else f" (default: {default})"
    shown: dict[str, Any] = {"help": item.help + words, "rich_help_panel": item.panel, "show_default": False}
    choices = "|".join(item.choices)
    shown["metavar"] = choices if 0 < len(choices) <= MOST_METAVAR else _METAVARS[item.kind]
    if len(choices) > MOST_METAVAR:
        shown["help"] += " One of: " + ", ".join(item.choices) + "."
    option = typer.Option(flags, envvar=item.variable, show_envvar=False, **shown)
    kind = bool | None if item.kind is bool else str | None
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _extra_options() -> list[inspect.Parameter]:
    files = typer.Option(
        "--env-file",
        help="Read settings from this file instead of ./.env; repeatable, a later one wins.",
        rich_help_panel="Run",
        is_eager=True,
        callback=_load_files,
        metavar="PATH",
    )
    local = typer.Option("--local-rank", "--local_rank", hidden=True)
    annotations = {"env_file": Annotated[list[str] | None, files], "local_rank": Annotated[str | None, local]}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in annotations.items()
    ]


def _load_files(ctx: typer.Context, value: list[str] | None) -> list[str] | None:
    """Put the .env files' values in as the parser's default map, before the other options are read."""
    paths = [Path(text) for text in value or [] if text] or ([_WORKING_FILE] if os.path.isfile(_WORKING_FILE) else [])  # noqa: PTH113 - Path.is_file raises
    texts = read_files(paths)
    if isinstance(ctx.obj, Texts):  # what the environment said
        texts.warnings[:0] = ctx.obj.warnings
    ctx.default_map = dict(texts.values)
    ctx.obj = texts
    return value


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command(resolved, ...)` an option for each setting; its other parameters stay as they are."""
    own = [item for name, item in inspect.signature(command, eval_str=True).parameters.items() if name != "resolved"]

    @functools.wraps(command)
    def run(ctx: typer.Context, **given: Any) -> Any:
        kept = {item.name: given[item.name] for item in own}
        return command(resolve(ctx, given), **kept)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    keywords = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
    parameters = [context, *keywords, *map(_option, settings().values()), *_extra_options()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def resolve(ctx: typer.Context, given: Mapping[str, Any]) -> Resolved:
    """Turn what typer read into a Config, with the source of each value.

    Raises:
        SettingError: a value is not allowed; the line says where it came from.
    """
    texts: Texts = ctx.obj
    values, sources = {}, {}
    for name, item in settings().items():
        source = ctx.get_parameter_source(name)
        kind = source.name if source is not None else "DEFAULT"
        if given[name] is None or kind == "DEFAULT":
            values[name], sources[name] = item.default, "default"
            continue
        sources[name] = {"COMMANDLINE": "command line", "ENVIRONMENT": f"environment variable {item.variable}"}.get(
            kind
        ) or texts.origins[name]
        values[name] = parse(item, str(given[name]), origin=sources[name])
    return Resolved(build(values), sources, texts.warnings, texts.others, _local_rank(ctx, given))


def _local_rank(ctx: typer.Context, given: Mapping[str, Any]) -> int | None:
    # The legacy launcher puts it right after the program's name, before the sub-command.
    text = given["local_rank"]
    parent = ctx.parent
    if text is None and parent is not None:
        text = parent.params.get("local_rank")
    if text is None:
        return None
    shown = Setting("local_rank", int, True, None, "", "", "operation", minimum=0)
    number = parse(shown, str(text), origin="command line")
    assert number is None or isinstance(number, int)
    return number
