"""Every command with its options, as `agent-r1 --help` lists them, in the order in which the README tells the story.

A command imports what it runs when it runs: help and completion are there at once, and torch comes after the process is
prepared for it. The docstrings are the help.
"""

from flows.commands import graph, look, operate, serve  # noqa: F401 - each adds its commands, in this order
from flows.commands.shared import app as app
