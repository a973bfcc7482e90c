"""The command line: the one door to argv, os.environ and .env files, and the place where errors become exit codes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.cli.environment import AGENT_JOB


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, or the job that our agent handed to this process, and return the exit code."""
    if AGENT_JOB in os.environ:
        from trainer.cli.launching import run_child  # without the parser, which costs a quarter of a second

        return run_child()
    from trainer.cli.commands import run_command

    return run_command(arguments)


__all__ = ["main"]
