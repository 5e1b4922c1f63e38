"""The command line: `agent-r1 NAME`, or `python -m flows NAME`, from any folder inside the project."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

PROGRAM = "agent-r1"


def main() -> None:
    """Runs one command as the whole of this process; its libraries are imported inside the rim."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))  # until the rim sets its own
    from flows.made_of import stage_at_start

    stage_at_start()  # before any of it is imported
    from typer.main import get_command

    from agent_r1.harmless import harmless_lines
    from agent_r1.surroundings import settle, take_secrets
    from flows.commands import app
    from flows.stage import clean_end

    sys.argv[0] = PROGRAM  # MLflow shows it as the source of a run
    try:
        with clean_end():
            take_secrets()
            settle()
            get_command(app).main(prog_name=PROGRAM)  # the app itself would format tracebacks
    except SystemExit as end:
        if isinstance(end.code, str):  # for a sentence Python prints it, and ends with 1
            sys.stderr.write(f"{harmless_lines(end.code)}\n")
            leave(1)
        leave(end.code or 0)


def leave(code: int) -> NoReturn:
    """Ends the process like Python, but frees nothing: freeing all imports of a stage takes two seconds.

    Threads end first, then exit functions run, as in a child process of `multiprocessing`. A signal cuts that short.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(code))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
