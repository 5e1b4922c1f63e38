"""The champion as an artifact of DVC's: models/champion.dvc, and git's tags in the form of GTO.

`dvc artifacts get` finds a policy by such a tag, in any clone with a remote of DVC's, and needs no MLflow.
"""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from shlex import quote

from agent_r1.files import remove_folder
from agent_r1.params.places import MODELS
from agent_r1.tracking.registry import CHAMPION, MODEL, Version
from agent_r1.tracking.runs import git
from flows.dvc_files import dvc_environment, kept, link_to_cache, require_listing, run_dvc, write_dvc_file

FILE = MODELS / f"{CHAMPION}.dvc"

logger = logging.getLogger(__name__)


def name(champion: Version) -> None:
    """Has models/champion.dvc name the policy of a version, and puts the policy beside it; warns if DVC lacks it."""
    if not (md5 := champion.descriptor.dvc_hash) or not Path(".dvc").is_dir():
        return
    write_dvc_file(FILE, md5)
    remove_folder(FILE.with_suffix(""))
    if not (lacking := require_listing(md5)):
        try:
            link_to_cache(FILE)
        except FileNotFoundError:
            lacking = run_dvc("pull", "--force", str(FILE))
    if lacking:
        logger.warning("DVC has no copy of %s (%s); `dvc pull %s` where a remote has it", champion.name, lacking, FILE)


def tagging(champion: Version) -> str:
    """The command that commits models/champion.dvc and tags it; "" outside of git, or if DVC keeps no policies.

    Raises ValueError if the version's tag is that of another policy, which another MLflow store gave the number.
    """
    if not git("rev-parse", "HEAD") or kept(FILE) != champion.descriptor.dvc_hash:
        return ""
    tag, named = f"{MODEL}@v{champion.number}.0.0", len(git("tag", "--list", f"{MODEL}#{CHAMPION}#*").split())
    if (tagged := git("show", f"{tag}:{FILE}")) and champion.descriptor.dvc_hash not in tagged:
        other = f"the tag {tag} is another policy's, which another MLflow store gave that number"
        raise ValueError(f"{other}; `git tag --delete {tag}` makes room")
    said = quote(f"{champion.reference} is the champion")
    commit = f"git add {FILE} && (git diff --quiet HEAD -- {FILE} || git commit -qm {said} -- {FILE})"
    first = [] if tagged else [commit, f"git tag -am {said} {quote(tag)}"]
    return " && ".join(
        [*first, f"git tag -am {said} {quote(f'{MODEL}#{CHAMPION}#{named + 1}')} {quote(f'{tag}^{{}}')}"]
    )


def run(command: str) -> None:
    """Runs the command of `tagging`. Raises ValueError with git's words if it fails."""
    done = subprocess.run(["sh", "-c", command], env=dvc_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        wrong = " ".join((done.stderr or done.stdout).split())
        raise ValueError(f"git could not tag the champion: {wrong}; mend that, and promote it again with --tag")
