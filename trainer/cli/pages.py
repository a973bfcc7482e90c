"""The texts of `trainer config`: the values with their sources, and the reference page of all settings."""

from __future__ import annotations

from itertools import groupby

from trainer.cli.options import Resolved
from trainer.config import settings


def config_page(resolved: Resolved) -> str:
    """Return a line for each setting: flag, value, source."""
    rows = [
        (item.flag, _shown(getattr(resolved.config, name)), resolved.sources[name]) for name, item in settings().items()
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "".join(f"{flag:<{first}}  {value:<{second}}  {source}\n" for flag, value, source in rows)


def _shown(value: object) -> str:
    if value is None:
        return "(unset)"
    return str(value).lower() if isinstance(value, bool) else str(value)


_HEAD = """\
# Settings

One setting is a flag (`--global-batch-size`), a variable (`TRAINER_GLOBAL_BATCH_SIZE`) and a key of a .env file (the same
name). The command line wins over the environment, the environment over .env files, and those over the default. `.env` in the
working folder is read, or the files given with `--env-file`, of which a later one wins. An empty value means unset.
`trainer config` prints each value and where it came from.

"Must match" settings belong to the experiment: a run is resumed with the same values, or not at all.

This page is written by `make docs` from `trainer/config.py`.
"""


def settings_page() -> str:
    """Return docs/settings.md."""
    parts = [_HEAD]
    for panel, items in groupby(settings().values(), key=lambda item: item.panel):
        parts.append(
            f"\n## {panel}\n\n| setting | default | allowed | on resume | what it does |\n| --- | --- | --- | --- | --- |\n"
        )
        for item in items:
            allowed = item.allowed.replace("|", "\\|")
            resume = "must match" if item.tag == "experiment" else "may change"
            parts.append(f"| `{item.flag}` | {_shown(item.default)} | {allowed} | {resume} | {item.help} |\n")
    return "".join(parts)
