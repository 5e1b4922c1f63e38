"""Names that become paths, and what a registry or a remote says of where things lie."""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import re
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

from pydantic import TypeAdapter

from agent_r1.harmless import harmless, harmless_lines, in_markdown, without_password
from agent_r1.http.client import Client
from agent_r1.params.places import Folder, RunId, registered_policy
from agent_r1.params.prepare import DatasetName
from agent_r1.params.sections import validated
from agent_r1.params.stages import ServerParams
from agent_r1.tracking import registry, store
from agent_r1.tracking.registry import Descriptor
from benchmarks.hostile.kind import Defect, Kind, Refused, require
from benchmarks.hostile.mutations import LONG, PASSWORD, PATHS, TEXTS, as_bytes, as_json, mutated, odd_text
from flows import dvc_files
from flows.terminal import HarmlessFormatter

_HASH = "a" * 64
_VERSION: Any = SimpleNamespace(
    name="agent_r1", version=4, tags={}, source=f"file:/{'1' * 32}/artifacts/policies/{_HASH[:8]}/descriptor.json"
)
_MARKUP = re.compile(r"(?<!\\)(\\\\)*[`|<\[]")  # after no backslash, or after backslashes that are shown
_ESCAPE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_HONEST = Descriptor(
    label="ppo-seed3", run="ppo", seed=3, sweep="", mlflow_run_id="1" * 32,
    policy="outputs/train/ppo-seed3/checkpoint/policy", policy_hash=_HASH, policy_version=7,
    dvc_file=registered_policy("ppo-seed3", _HASH).as_posix(), dvc_hash=f"{'1' * 32}.dir", git_commit="c0ffee",
    data_hash=f"{'3' * 32}+{'4' * 32}.dir", questions="5" * 64, passages="6" * 64, index="7" * 64, prompt="8" * 64,
    config="9" * 16,
)  # fmt: skip


class Tags(Kind):
    """The descriptor of a registered version: that of a training, or the version is left out."""

    name, tried = "registry descriptors", 2500

    def make(self, rng: Random) -> dict[str, str]:
        honest = {name: str(value) for name, value in asdict(_HONEST).items()}
        made = mutated(honest, rng, rng.choice((1, 1, 2)))
        if rng.random() < 0.4:
            made[rng.choice([*honest])] = _path(rng)
        if rng.random() < 0.2:  # all that follows from a label
            made |= {"label": _path(rng), "policy_hash": _HASH}
            made["dvc_file"] = f"models/{made['label']}-{_HASH[:8]}.dvc"
        return {name: value if isinstance(value, str) else str(value)[:LONG] for name, value in made.items()}

    def judge(self, made: dict[str, str]) -> None:
        warned: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = warned.append  # type: ignore[method-assign]
        store.logger.addHandler(handler)
        disabled, logging.root.manager.disable = logging.root.manager.disable, 0
        store.logger.propagate = False
        store.warn_once.cache_clear()
        try:
            with patch.object(registry, "_stored", lambda *_: json.dumps(made).encode()):
                found = registry._read(Mock(), "", _VERSION)
        finally:
            store.logger.removeHandler(handler)
            store.logger.propagate, logging.root.manager.disable = True, disabled
        if found is None:
            raise Refused("".join(record.getMessage() for record in warned))
        for path in (found.policy, found.dvc_file, found.label):
            require(inside(path) or not path, f"a path outside of the project: {path!r}")
            require_short(path)
        require(
            not found.dvc_file or found.dvc_file.startswith("models/"), f"not beside the models: {found.dvc_file!r}"
        )
        require(type(found.seed) is int and found.seed >= 0, f"no seed: {found.seed!r}")

    def names(self, made: dict[str, str]) -> tuple[str, ...]:
        return ("models:/agent_r1/4 is skipped: ",)


class Listings(Kind):
    """The listing of a folder in a remote: names of files in it, or it is refused."""

    name, tried = "remote listings", 2500

    def make(self, rng: Random) -> tuple[bytes, str]:
        entries: Any = [{"md5": f"{n:032x}", "relpath": f"below/file{n}"} for n in range(3)]
        if rng.random() < 0.6:
            entries[rng.randrange(3)]["relpath"] = _path(rng)
        else:
            entries = mutated(entries, rng, 2)
        content = as_bytes(as_json(entries, rng) if rng.random() < 0.4 else json.dumps(entries), rng)
        if rng.random() < 0.1:
            return content, f"{'0' * 32}.dir"
        return content, f"{hashlib.md5(content, usedforsecurity=False).hexdigest()}.dir"

    def judge(self, made: tuple[bytes, str]) -> None:
        content, md5 = made
        dvc_files._require_inside(content, md5, "the remote")
        require(hashlib.md5(content, usedforsecurity=False).hexdigest() in md5, "another listing than its name says")
        for entry in json.loads(content):
            require(inside(entry["relpath"]), f"a path outside of the folder: {entry['relpath']!r}")

    def names(self, made: tuple[bytes, str]) -> tuple[str, ...]:
        return (made[1],)


class Names(Kind):
    """Labels of trainings, data sets, folders and references, which become paths and names of metrics."""

    name, tried = "names", 3000
    _folders, _datasets = TypeAdapter(Folder), TypeAdapter(DatasetName)

    def make(self, rng: Random) -> tuple[str, str]:
        return rng.choice(("label", "folder", "dataset", "reference")), _path(rng)

    def judge(self, made: tuple[str, str]) -> None:
        what, name = made
        match what:
            case "label":
                run = RunId.parse(name)
                require(RunId.parse(run.label) == run, "a label that means two trainings")
                name = run.label
            case "folder":
                name = self._folders.validate_python(name)
            case "dataset":
                name = self._datasets.validate_python(name)
            case "reference":
                if not registry.REFERENCE.fullmatch(name):
                    raise Refused(repr(name))
                name = name.removeprefix(registry.SCHEME)
        if what in ("label", "folder"):
            require_short(name)
        require(inside(name) or what == "dataset", f"a {what} that leads out: {name!r}")

    def names(self, made: tuple[str, str]) -> tuple[str, ...]:
        return (repr(made[1])[1:9], made[1][:9]) if made[1] else ("",)


class Addresses(Kind):
    """Addresses with passwords and keys, in texts with escape sequences and markup: what is shown has none of them."""

    name, tried, holds_secrets = "addresses", 2500, True

    def make(self, rng: Random) -> str:
        password = rng.choice((PASSWORD, f"{PASSWORD}@", f"a:{PASSWORD}", f"{PASSWORD}\u00e9", f"%40{PASSWORD}"))
        scheme = rng.choice(("http", "https", "HTTP", "s3", "postgresql+psycopg", "x-y.z"))
        host = rng.choice(("host", "127.0.0.1:8001", "[::1]:80", "h\u00f6st", "host:port", "", "a.b/c?d=e@f#g"))
        user, end = rng.choice(("user:", "", "u%20x:", ":")), rng.choice(("", "x", "@", "//"))
        url = f"{scheme}://{user}{password}@{host}/{end}"
        if rng.random() < 0.4:
            url = (
                f"{scheme}://{rng.choice(('host', '[::1]:80'))}/{end}?{rng.choice(('key=', '', 'a=b&sig='))}{password}"
            )
        command = rng.choice(("\x1b[2J", "\x9b1m", "\u202e", "\x08", "\r\n")) + rng.choice(("<b>", "|", "`", "[a](b)"))
        around = odd_text(rng)[:500], odd_text(rng)[:500]
        return rng.choice((url, url, f"{around[0]} {url}{around[1]}", f"('{url}')", f"{url} {url}")) + command

    def judge(self, made: str) -> None:
        record = logging.LogRecord("agent_r1", logging.ERROR, "", 0, "%s", (made,), None)
        for shown in (without_password(made), logged := HarmlessFormatter("%(message)s").format(record)):
            require(PASSWORD not in shown, f"a password is shown: {shown!r:.200}")
        for shown in (harmless(made), in_markdown(made), harmless_lines(made), logged):
            require(not _ESCAPE.search(shown), f"a control character is shown: {shown!r:.200}")
        require(not _MARKUP.search(in_markdown(made)), f"markup is shown: {in_markdown(made)!r:.200}")
        require("\n" not in harmless(made), "a line break in a line")
        server = {"urls": [made], "concurrency": 1, "timeout_s": 1, "retries": 0}
        try:
            Client(validated(ServerParams, server, "section").urls[0], 1.0, key="")
        except ValueError as fault:
            require(PASSWORD not in str(fault), f"a password is shown: {fault}")
        else:
            require(PASSWORD not in made, "an address with a password was taken")
        raise Refused("an address with a password")


def inside(path: str) -> bool:
    """Whether a path stays in its folder."""
    whole = posixpath.normpath(posixpath.join("/project", path))
    return f"{whole}/".startswith("/project/")


def require_short(path: str) -> None:
    """Raises Defect if a disk cannot have such a path."""
    try:
        Path(path).exists()
    except OSError as fault:
        raise Defect(f"{fault.strerror}: {path[:80]}") from None


def _path(rng: Random) -> str:
    """A name that leads elsewhere, or is near one that is honest."""
    honest = rng.choice(
        ("ppo", "ppo-seed3", "ppo-0a1b2c3d-seed3", "outputs/x", "models:/agent_r1/3", "models:/agent_r1@champion")
    )
    match rng.randrange(5):
        case 0:
            return rng.choice(PATHS)
        case 1:
            return f"{honest}{rng.choice(TEXTS)}"
        case 2:
            return f"{rng.choice(PATHS)}{honest}"
        case 3:
            at = rng.randrange(len(honest) + 1)
            return honest[:at] + rng.choice((*TEXTS, "9" * 400, "a" * 300)) + honest[at:]
    return rng.choice((odd_text(rng), honest))
