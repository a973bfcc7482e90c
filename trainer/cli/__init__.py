"""The command line: the one door to argv, os.environ and .env files, and the place where errors become exit codes."""

from trainer.cli.commands import main

__all__ = ["main"]
