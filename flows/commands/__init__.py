"""All commands with their options, in the order of `agent-r1 --help` and of the README.

A command imports its libraries when it runs: help and completion appear at once, and torch is imported after the
process is prepared for it. The docstrings are the help.
"""

from flows.commands import execute, look, operate  # noqa: F401 - each adds its commands, in this order
from flows.commands.options import app as app
