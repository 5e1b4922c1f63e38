"""The command line: `agent-r1 NAME`, or `python -m flows NAME`, from any folder inside the project."""

from __future__ import annotations

import signal
import sys

PROGRAM = "agent-r1"


def main() -> None:
    """Runs one command as the whole of this process; its libraries are imported inside of the rim."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))  # until the rim is there
    from typer.main import get_command

    from flows.commands import app
    from flows.stage import clean_end

    sys.argv[0] = PROGRAM  # what MLflow calls the source of a run
    with clean_end():
        get_command(app).main(prog_name=PROGRAM)  # an app itself would show tracebacks in its own way


if __name__ == "__main__":
    main()
