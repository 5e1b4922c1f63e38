"""The surroundings of a process, put right at its start: proxies, open files, a user without a home."""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
import resource
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agent_r1.files import closed_folder
from agent_r1.harmless import without_password

_OWN = ("localhost", "127.0.0.1", "::1")  # where this project's own servers are asked
_ENOUGH = 4096  # open files, below which episodes wait for each other
_BASE = 128  # files that a process has open
_EPISODE = 3  # files that an episode opens: to the engine and to its world

# What torch, oneDNN, MKL, OpenBLAS and numpy read when they first compute, for kernels of AVX2; vLLM asks torch. MKL
# takes kernels of its own for AMD's processors, unless it is to take those for all.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
}
_CPUINFO = Path("/proc/cpuinfo")
_AVX2 = {"avx2", "fma"}  # as Linux names them

SEALED = "AGENT_R1_SEALED"  # is set where no child gets a secret; names the socket that holds them at first
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|AUTH_STRING", re.IGNORECASE)  # in the name of a variable

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


def pin_kernels() -> None:
    """Has this process and its children compute with kernels of AVX2, if none has computed before.

    Raises ValueError on a processor without AVX2.
    """
    if not processor_flags() >= _AVX2:
        raise ValueError(
            "model.portable: true pins kernels to AVX2, which this processor lacks; set it to false, and expect other "
            "digits than on processors that have it"
        )
    os.environ.update(PORTABLE)


def are_pinned() -> bool:
    """Whether this process has the variables of `pin_kernels`."""
    return PORTABLE.items() <= os.environ.items()


def processor_flags() -> set[str]:
    """What the processor can do, by Linux's names; nothing where it is no x86-64."""
    return {*(re.findall(r"^flags\s*: (.*)", _cpuinfo(), re.MULTILINE) or [""])[0].split()}


def machine() -> str:
    """The cores that this process may use, their name, and the widest instruction set that its kernels use."""
    names = re.findall(r"^model name\s*: (.*)", _cpuinfo(), re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    sets = {"avx2"} if are_pinned() else processor_flags()
    widest = "AVX-512" if "avx512f" in sets else "AVX2" if "avx2" in sets else "without AVX2"
    return f"{cores} core{'s' * (cores > 1)} of {names[0] if names else 'an unnamed processor'}, {widest}"


def _cpuinfo() -> str:
    return _CPUINFO.read_text() if _CPUINFO.exists() else ""


def is_secret(name: str, value: str) -> bool:
    """Whether a variable of the environment is a key or a password, or an address with one."""
    return bool(_SECRET.search(name)) or without_password(value) != value


def keep_inside(variables: Mapping[str, str]) -> None:
    """Sets variables that this process reads in `os.environ`, and that its children do not inherit."""
    os.environ.update(variables)
    for name in variables:
        os.unsetenv(name)


def execute_without_secrets(command: list[str]) -> None:
    """Executes this process anew by a command, unless it was started without a secret; `take_secrets` is the other end.

    Linux shows the environment with which a process was started to all programs of its user, whatever becomes of it.
    """
    file = Path("/proc/self/environ")
    entries = os.fsdecode(file.read_bytes()).split("\0") if file.exists() else []
    pairs = [(name, value) for name, _, value in (entry.partition("=") for entry in entries)]
    secrets = {name: value for name, value in pairs if is_secret(name, value)}
    if not secrets:
        os.environ[SEALED] = ""
        return
    left, right = socket.socketpair()  # which other programs cannot open, as they can a pipe
    left.sendall(json.dumps(secrets).encode())
    left.close()
    right.set_inheritable(True)
    rest = {name: value for name, value in os.environ.items() if name not in secrets}
    os.execve(command[0], command, rest | {SEALED: str(right.fileno())})


def take_secrets() -> None:
    """Takes the secrets without which this process was executed anew, if it was."""
    if descriptor := os.environ.pop(SEALED, ""):
        with socket.socket(fileno=int(descriptor)) as right, right.makefile() as file:
            keep_inside(json.load(file))


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
