"""A command's settings once they are read, and the job that the agent hands to its children: no parser is needed here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Config, build, settings


@dataclass(frozen=True)
class Resolved:
    """Hold a command's settings.

    Attributes:
        sources: where each setting's value came from, by name.
        warnings: one line each, about the environment and files.
        others: keys of .env files that are no settings.
        local_rank: what the legacy torch.distributed.launch gave as an argument, or None.
    """

    config: Config
    sources: Mapping[str, str]
    warnings: list[str]
    others: Mapping[str, str]
    local_rank: int | None


@dataclass(frozen=True)
class Job:
    """Hold what a rank is to do: `command` is train, eval or prepare, `target` what eval evaluates.

    `restarts` says why each start before this one ended, where our agent starts the ranks anew.
    """

    resolved: Resolved
    command: str
    target: Path | None = None
    restarts: tuple[str, ...] = ()

    def dumps(self) -> str:
        """Return the job as a text: a child reads no file and no environment again, so all ranks have the same settings."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @staticmethod
    def loads(text: str) -> Job:
        """Return the job of a text that `dumps` made."""
        found = json.loads(text)
        values = found["resolved"].pop("config")
        paths = {name for name, item in settings().items() if item.kind is Path and values[name] is not None}
        config = build({name: Path(value) if name in paths else value for name, value in values.items()})
        target = Path(found["target"]) if found["target"] is not None else None
        return Job(Resolved(config=config, **found["resolved"]), found["command"], target, tuple(found["restarts"]))
