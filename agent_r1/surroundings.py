"""The surroundings of a process, put right at its start: proxies, open files, a user without a home."""

from __future__ import annotations

import logging
import os
import pwd
import resource
import tempfile
from contextlib import suppress
from pathlib import Path

from agent_r1.files import closed_folder

_OWN = ("localhost", "127.0.0.1", "::1")  # where this project's own servers are asked
_ENOUGH = 4096  # open files, below which episodes wait for each other
_BASE = 128  # files that a process has open
_EPISODE = 3  # files that an episode opens: to the engine and to its world

logger = logging.getLogger(__name__)


def settle() -> None:
    """Puts this process's surroundings right, and its children's: every command and every `Trainer` begins with it.

    Own servers are asked without the proxy that the environment may name. A user whose home cannot be written to
    gets a folder in its place. As many files may be open as the system allows, which is said where that is few. Raises
    ValueError if another user has made that folder.
    """
    for name in ("no_proxy", "NO_PROXY"):
        direct = os.environ.get(name, os.environ.get("NO_PROXY", ""))
        os.environ[name] = ",".join(dict.fromkeys([*filter(None, direct.split(",")), *_OWN]))
    if not os.access(os.environ.get("HOME", home()), os.W_OK):
        unwritable = os.environ.get("HOME", "")
        os.environ["HOME"] = str(closed_folder(home()))
        logger.warning("the home %s cannot be written to: %s is used in its place", unwritable, home())
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # libraries ask for the name of the account
        os.environ.setdefault("LOGNAME", str(os.getuid()))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < _ENOUGH:
        logger.warning(
            "this account may have %d files open at once, so %d episodes run at a time where env.order is by arrival; "
            "have the limit raised (`ulimit -Hn`, or --ulimit nofile of a container)",
            most,
            room(),
        )


def home() -> Path:
    """The home of this user's account, or a folder beside temporary files if there is none that can be written to."""
    with suppress(KeyError):  # an account without an entry
        folder = Path(pwd.getpwuid(os.getuid()).pw_dir)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"agent_r1-{os.getuid()}"


def room() -> int:
    """How many connections this process may hold at once beside its other open files, or episodes by arrival."""
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _ENOUGH)
    return max(8, (files - _BASE) // _EPISODE)
