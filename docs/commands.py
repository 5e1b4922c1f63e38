"""Writes the page of all commands: `python -m docs.commands`. A test holds the page to what it writes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from typer.main import get_command

from flows import commands

PAGE = Path(__file__).with_name("commands.md")
HEAD = """\
# Commands

By the groups of `agent-r1 --help`; `agent-r1 COMMAND --help` says the same of one. What several take is explained once.
`python -m docs.commands` writes this page."""
OF_TYPER = ("install_completion", "show_completion", "help")


def page() -> str:
    """The whole page: a table per group, a row per command, with its arguments and options."""
    group: Any = get_command(commands.app)
    parts = [HEAD]
    explained: set[str] = set()
    for panel, members in groupby(group.commands.values(), key=lambda command: command.rich_help_panel):
        rows = [row(command, explained) for command in members]
        parts.append(
            "\n".join([f"## {panel}\n", "| command | what it does | arguments and options |", "|---|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"


def row(command: Any, explained: set[str]) -> str:
    """A command in a line; what earlier lines explained stands by its name alone, and what this one does joins it."""
    given = []
    for parameter in command.params:
        if parameter.name in OF_TYPER:
            continue
        explanation = shown(parameter)
        given.append(named(parameter) if explanation in explained else explanation)
        explained.add(explanation)
    about = " ".join((command.help or "").split("\n\n")[0].split())
    return f"| `{command.name}` | {about} | {'<br>'.join(given)} |"


def shown(parameter: Any) -> str:
    """An argument or option, with what its help says."""
    about = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"{named(parameter)} {about}".rstrip()


def named(parameter: Any) -> str:
    """An argument or option by its name."""
    return f"`{parameter.name.upper() if parameter.param_type_name == 'argument' else parameter.opts[0]}`"


if __name__ == "__main__":
    PAGE.write_text(page())
