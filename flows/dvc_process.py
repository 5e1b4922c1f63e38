"""DVC in a process of its own: `python -m flows.dvc_process VERB ...`.

`command` is DVC's command line. The other verbs read and write what no command of DVC's does, under its lock.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from agent_r1.replaced import keep_dvc_records_whole
from flows.processes import IMPORTING

if TYPE_CHECKING:
    from dvc.repo import Repo


def command(arguments: list[str]) -> NoReturn:
    """Runs DVC's command line without two costs that exceed many a command.

    These are a search for garbage among its own imports, and the release of all of them at its end. A SIGTERM that its
    group gets ends its stage, and DVC then or after its writing.
    """
    gc.set_threshold(*IMPORTING)
    from dvc.cli import main

    keep_dvc_records_whole()
    signal.signal(signal.SIGTERM, lambda *_: None)
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def describe(repo: Repo, *stages: str) -> None:
    """Prints, by stage, what it is made of, from the files that are there, and its outputs' hashes from dvc.lock."""
    from flatten_dict import flatten

    described = {}
    for address in stages:
        [stage] = repo.stage.collect(address)
        stage.deps = [dep for dep in stage.deps if dep.exists]
        stage.save_deps()
        made_of = {"its command": stage.cmd, **{dep.def_path: dep.hash_info.value for dep in stage.deps}}
        flat = flatten(made_of, reducer="dot", keep_empty_types=(dict,))
        outs = {out.def_path: out.hash_info.value or "" for out in stage.outs}
        described[address] = [{name: json.dumps(value) for name, value in flat.items()}, outs]
    json.dump(described, sys.stdout)


def bring(repo: Repo, *stages: str) -> None:
    """Puts outputs of stages into their places, by hashes that standard input has.

    Outputs in their place are left alone: DVC refuses to touch them while another stage reads them. Raises ValueError
    if the remote has other bytes.
    """
    from dvc_data.hashfile.hash_info import HashInfo

    hashes = json.load(sys.stdin)
    remote = repo.cloud.get_remote_odb()
    remote.verify = True
    for address in stages:
        [stage] = repo.stage.collect(address)
        for out in stage.outs:
            out.hash_info = HashInfo("md5", hashes[out.def_path])
        if any(out.workspace_status() for out in stage.outs):
            objects = {entry for entries in stage.get_used_objs().values() for entry in entries}
            repo.cloud.pull(objects, odb=remote)
            stage.checkout()
        if lacking := [str(out) for out in stage.outs if out.workspace_status()]:
            raise ValueError(f"it has other bytes than its hash says, or lacks a file: {', '.join(lacking)}")


def read_object(repo: Repo, md5: str, most_bytes: str) -> None:
    """Prints one object of the default remote alone; `dvc fetch` and `dvc get-url` would follow the listing in it."""
    remote = repo.cloud.get_remote_odb()
    with remote.fs.open(remote.oid_to_path(md5), "rb") as stored:
        sys.stdout.buffer.write(stored.read(int(most_bytes)))


def put_back(_: Repo) -> None:
    """Puts whole copies in the place of records of DVC's that were cut off."""
    from flows import dvc_files

    dvc_files.put_back()


VERBS: dict[str, Callable[..., None]] = {verb.__name__: verb for verb in (describe, bring, read_object, put_back)}


def main() -> None:
    """Ends with the fault of DVC's as its complaint."""
    verb, *arguments = sys.argv[1:]
    if verb == "command":
        command(arguments)
    from dvc.repo import Repo, lock_repo

    keep_dvc_records_whole()
    try:
        repo = Repo(_wait_for_lock=True)
        with lock_repo(repo):
            VERBS[verb](repo, *arguments)
    except Exception as fault:
        sys.exit(" ".join(str(fault).split()) or repr(fault))


if __name__ == "__main__":
    main()
