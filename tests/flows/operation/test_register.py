"""Registered policies on disk: kept by a real DVC, found by name, brought back, and refused where they have gone."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from agent_r1.files import sha256, write_text
from agent_r1.learn import checkpoint
from agent_r1.learn.checkpoint import Progress
from agent_r1.params import load
from agent_r1.params.places import RunId, registered_policy, registered_training
from agent_r1.tracking import registry
from agent_r1.tracking.registry import Version
from flows.dvc_files import DVC, ask_dvc, require_listing
from flows.operation import register as register_stage
from flows.operation.register import keep
from flows.policies import folder_of, version_of
from tests.cases import cases
from tests.fixtures import ROOT, Inside, WriteParams

POLICY = Path("outputs/train/ppo/checkpoint/policy")
Register = Callable[..., Version]


def dvc(*arguments: str) -> None:
    subprocess.run([*DVC, *arguments, "--quiet"], check=True)


def write_policy(folder: Path, weights: str) -> None:
    """Replaced whole, as a checkpoint is."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "extra").mkdir(parents=True)
    (folder / "model.safetensors").write_text(weights)
    (folder / "extra/config.json").write_text("{}")


def forget(version: Version) -> None:
    shutil.rmtree(Path(version.descriptor.dvc_file).with_suffix(""))


def found_for(version: registry.Version) -> Path:
    return folder_of(version.descriptor, version.reference)


@pytest.fixture(scope="module")
def empty_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    shutil.copy(ROOT / ".gitignore", folder)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "*.local"))
    shutil.copy(ROOT / "params.yaml", folder)
    subprocess.run(["git", "init", "-q"], check=True, cwd=folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, empty_project: Path, inside: Inside) -> Iterator[Path]:
    folder = tmp_path / "project"
    shutil.copytree(empty_project, folder)
    with inside(folder):
        write_policy(POLICY, "first")
        yield folder


@pytest.fixture
def register(register_descriptor: Register) -> Register:
    def make(policy: Path = POLICY, label: str = "ppo", *, keeps_training: bool = False) -> Version:
        policy_hash = sha256(policy)
        file = registered_policy(label, policy_hash)
        kept = {"dvc_hash": keep(policy, file)}
        kept["dvc_file"] = str(file) if kept["dvc_hash"] else ""
        if keeps_training:
            kept["dvc_training_hash"] = keep(policy.parents[1], registered_training(file))
        return register_descriptor(policy_hash, label, policy=str(policy), **kept)

    return make


def test_dvc_keeps_one_copy_of_a_policy(project: Path, register: Register) -> None:
    """The content beside the file is linked to the cache, and stays the same when the policy is registered again."""
    version = register()
    file = Path(version.descriptor.dvc_file)
    weights = file.with_suffix("") / "model.safetensors"
    in_cache = [path.stat().st_ino for path in Path(".dvc/cache").rglob("*") if path.is_file()]
    assert weights.stat().st_ino in in_cache
    assert ask_dvc("status").stdout == "Data and pipelines are up to date.\n"
    inode = weights.stat().st_ino
    register()
    assert weights.stat().st_ino == inode
    assert yaml.safe_load(file.read_text())["outs"][0]["md5"] == version.descriptor.dvc_hash
    assert (POLICY / "model.safetensors").read_text() == "first"
    assert (POLICY / "model.safetensors").stat().st_mode & 0o200  # still the training's own, to be written


def test_policy_whose_folder_was_trained_again_comes_back_or_is_refused(project: Path, register: Register) -> None:
    first = register()
    assert found_for(first) == POLICY
    write_policy(POLICY, "second")
    second = register()
    assert found_for(second) == POLICY
    copy = found_for(first)
    assert copy == Path(first.descriptor.dvc_file).with_suffix("")
    assert (sha256(copy), (copy / "model.safetensors").read_text()) == (first.descriptor.policy_hash, "first")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_text("spoiled")
    assert sha256(found_for(first)) == first.descriptor.policy_hash
    shutil.rmtree(".dvc/cache")
    forget(first)
    message = r"/1 \(ppo\) has gone: .* of commit c0ffee, or `dvc pull models/ppo-.*\.dvc` where a remote has it"
    with pytest.raises(ValueError, match=message):
        found_for(first)


@pytest.mark.parametrize("held_by", ["cache", "remote"])
def test_mlflow_alone_is_enough_to_find_the_copy(
    project: Path, register: Register, tmp_path_factory: pytest.TempPathFactory, held_by: str
) -> None:
    version = register()
    if held_by == "remote":
        dvc("remote", "add", "--default", "elsewhere", str(tmp_path_factory.mktemp("remote")))
        dvc("gc", "--workspace", "--force")  # DVC finds its files of policies
        dvc("push")
        shutil.rmtree(".dvc/cache")
    Path(version.descriptor.dvc_file).unlink()
    forget(version)
    write_policy(POLICY, "second")
    assert sha256(found_for(version)) == version.descriptor.policy_hash


def test_registry_serves_a_clone(project: Path, register: Register, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = register(keeps_training=True).descriptor
    dvc("remote", "add", "--default", "elsewhere", str(tmp_path_factory.mktemp("remote")))
    register_stage._push(model)
    training = registered_training(Path(model.dvc_file))
    contents = [each.with_suffix("") for each in (Path(model.dvc_file), training)]
    for gone in (".dvc/cache", "outputs", *contents, model.dvc_file):  # as in a clone beside the one that trained
        shutil.rmtree(gone) if Path(gone).is_dir() else Path(gone).unlink()
    assert sha256(found_for(registry.find("models:/agent_r1/1"))) == model.policy_hash
    dvc("pull", str(training))
    assert sha256(training.with_suffix("") / "checkpoint" / "policy") == model.policy_hash


@pytest.mark.parametrize("held_by", ["remote", "cache"])
def test_listing_that_leads_out_of_its_folder_is_refused_before_dvc_follows_it(
    project: Path, register: Register, tmp_path_factory: pytest.TempPathFactory, held_by: str
) -> None:
    """The attack as DVC itself takes it, with `verify`: the same listing under the same name."""
    version = register()
    md5 = version.descriptor.dvc_hash
    name, remote = f"files/md5/{md5[:2]}/{md5[2:]}", tmp_path_factory.mktemp("remote")
    dvc("remote", "add", "--default", "elsewhere", str(remote))
    dvc("remote", "modify", "elsewhere", "verify", "true")
    dvc("push")
    write_policy(POLICY, "second")
    forget(version)
    file = Path(version.descriptor.dvc_file)
    file.unlink()
    [weights] = {each["md5"] for each in json.loads((remote / name).read_text()) if "model" in each["relpath"]}
    for path in (remote / name, Path(".dvc/cache") / name):
        path.chmod(0o600)
        path.write_text(json.dumps([{"md5": weights, "relpath": "../../../GNUmakefile"}]))
    if held_by == "remote":
        shutil.rmtree(".dvc/cache")
    message = f"the listing {md5} is another one than its name says, in DVC's {held_by}; "
    with pytest.raises(ValueError, match=message):
        found_for(version)
    assert not any(path.exists() for path in (Path("../GNUmakefile"), file, file.with_suffix("")))


@cases("listing")
def test_listing_of_its_very_name_holds_files_of_its_folder_alone(project: Path, listing: object) -> None:
    """Whoever writes registry and remote both gives the hash as well."""
    text = json.dumps(listing)
    md5 = f"{hashlib.md5(text.encode()).hexdigest()}.dir"
    write_text(Path(".dvc/cache/files/md5") / md5[:2] / md5[2:], text)
    with pytest.raises(ValueError, match=rf"the listing {md5} names .*, no file of its folder, in DVC's cache; remove"):
        require_listing(md5)


def test_failed_push_warns_with_the_remedy(project: Path, register: Register, caplog: pytest.LogCaptureFixture) -> None:
    model = register().descriptor
    register_stage._push(model)
    assert "DVC" not in caplog.text, "without a default remote there is nothing to do"
    Path("taken").touch()
    dvc("remote", "add", "--default", "elsewhere", str(Path("taken").absolute()))
    register_stage._push(model)
    assert "ppo is registered, but other clones cannot have it yet, DVC could not push it (" in caplog.text
    assert "error.dvc.org" not in caplog.text
    assert "support" not in caplog.text
    assert f"mend that and run `dvc push {model.dvc_file}`" in caplog.text
    assert registry.versions()


def test_without_dvc_only_the_folder_itself_serves(tmp_path: Path, inside: Inside, register: Register) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    with inside(tmp_path):
        write_policy(POLICY, "first")
        version = register()
        assert (version.descriptor.dvc_file, version.descriptor.dvc_hash) == ("", "")
        assert found_for(version) == POLICY
        write_policy(POLICY, "second")
        with pytest.raises(ValueError, match="registered outside a DVC project, so there is no copy of it; train"):
            found_for(version)


def test_policy_is_kept_while_dvc_runs_the_stage(project: Path) -> None:
    """DVC holds no lock that `dvc add` needs while it runs a stage's command."""
    code = "from pathlib import Path; from flows.operation.register import keep; "
    code += f"Path('hash').write_text(keep(Path('{POLICY}'), Path('models/ppo-1234.dvc')))"
    stage = {"cmd": f'PYTHONPATH={ROOT} {sys.executable} -c "{code}"', "outs": ["hash"]}
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": {"train": stage}}))
    dvc("repro")
    assert yaml.safe_load(Path("models/ppo-1234.dvc").read_text())["outs"][0]["md5"] == Path("hash").read_text()


def test_label_means_what_the_trainings_folder_holds(project: Path, register: Register) -> None:
    first = register()
    write_policy(POLICY, "second")
    second = register()
    assert version_of("ppo", load()) == second == version_of("models:/agent_r1/2", load())
    write_policy(POLICY, "first")
    assert version_of("ppo", load()) == first
    write_policy(POLICY, "third")
    with pytest.raises(ValueError, match=f"ppo: the policy in {POLICY} is not registered; `agent-r1 register"):
        version_of("ppo", load())
    shutil.rmtree(POLICY)
    assert version_of("ppo", load()) == second


def test_label_is_that_of_a_folder_or_of_a_version_or_refused(project: Path, register: Register) -> None:
    """`--seed 0` is what `ppo` has anyway: another seed's folder with the same policy is the same version."""
    with pytest.raises(ValueError, match="there is no registered model 'grpo'; the registry is empty"):
        version_of("grpo", load())
    version = register(label="ppo_long")
    shutil.copytree(POLICY, "outputs/train/ppo-seed0/checkpoint/policy")
    assert version_of("ppo-seed0", load()) == version
    with pytest.raises(ValueError, match="there is no registered model 'ppo_lang'; did you mean 'ppo_long'"):
        version_of("ppo_lang", load())


@cases("iterations, message")
def test_unfinished_training_is_not_registered(
    project: Path, ppo: Path, write_params: WriteParams, iterations: int, message: str
) -> None:
    """Of adapters the weights that they are merged into are the last to come."""
    write_params(project, {})
    shutil.rmtree("outputs")
    shutil.copytree(ppo, "outputs/train/ppo")
    (POLICY / "adapter").mkdir()
    (POLICY / "model.safetensors").unlink()
    (POLICY.parent / "SHA256SUMS").unlink()
    checkpoint.seal(POLICY.parent, Progress(iterations=iterations, policy_version=1, policy_from=1))
    with pytest.raises(ValueError, match=message):
        register_stage.register(RunId("ppo"))
    assert not registry.versions()


def test_other_store_gets_the_version_that_the_file_names(project: Path, ppo: Path, write_params: WriteParams) -> None:
    write_params(project, {})
    shutil.rmtree("outputs")
    shutil.copytree(ppo, "outputs/train/ppo")
    with pytest.raises(ValueError, match=r"MLflow's store has no run .*; start the training again, which logs it"):
        register_stage.register(RunId("ppo"))
    file, policy = Path("outputs/register/ppo.json"), sha256(POLICY)
    origin = {"git_commit": "c0ffee", "data_hash": "d" * 32, "code": "0-2 abc"}
    file.parent.mkdir()
    file.write_text(json.dumps({"version": "models:/agent_r1/7", "policy": policy, **origin}))
    for _ in range(2):
        register_stage.register(RunId("ppo"))
        assert json.loads(file.read_text()) == {"version": "models:/agent_r1/1", "policy": policy, **origin}
    [version] = registry.versions()
    assert (version.descriptor.git_commit, version.descriptor.code) == ("c0ffee", "0-2 abc")
