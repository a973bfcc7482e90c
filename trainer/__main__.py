"""Make `python -m trainer` the same as the `trainer` command; nothing else lives here."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
