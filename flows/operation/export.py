"""Exports a policy as a folder for others: `agent-r1 export POLICY --to FOLDER --license NAME`, and to the Hub."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from string import Template

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from agent_r1 import tracking
from agent_r1.envs.base import Env
from agent_r1.envs.kinds import attempts_at, openings
from agent_r1.envs.shared import Shared
from agent_r1.evaluation.comparison import POLICY, decoding, latest_folder, read_hashes, read_scores
from agent_r1.evaluation.scores import BASELINES, SUCCESS, in_words
from agent_r1.files import EVALUATION_HASHES, model_hash, replaced_folder
from agent_r1.harmless import in_markdown
from agent_r1.identity import read_start
from agent_r1.learn import checkpoint
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params
from agent_r1.params.env import EnvParams
from agent_r1.records import Metrics, Question, words_of
from agent_r1.rollout.chat import Chat
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from flows.policies import Policy

CARD = Template(Path(__file__).with_name("card.md").read_text())
BESIDE = {"base_tool_call": ", before reinforcement learning", "random": ", chance", "oracle": ", a solver"}
THIS = "this policy"
NOT_SCORED = "It has no evaluation in the project that it comes from."
IN_TAGS = r"<tool_response>\n{answer}\n</tool_response>"
LIBRARIES = ("torch", "transformers")

logger = logging.getLogger(__name__)


def export(settings: Params, policy: Policy, target: Path, license_name: str) -> None:
    """Writes the whole Hugging Face folder of a policy, with a model card.

    Raises ValueError if the target exists, or if the policy is a model of the hub or holds adapters alone.
    """
    folder = Path(policy.path)
    if not folder.is_dir():
        raise ValueError(f"{policy.path} is on the hub already; export a policy that was trained here")
    if target.exists():
        raise ValueError(f"{target} is there already; name another folder, nothing is replaced")
    if checkpoint.is_adapters_alone(folder):
        raise ValueError(f"{folder} holds adapters alone; train the run to its end, which merges them")
    prompt = prompt_of(settings, policy)
    card = model_card(settings, policy, license_name, prompt)
    with replaced_folder(target) as fresh:
        shutil.copytree(folder, fresh)
        card.save(fresh / "README.md")
        (fresh / "prompt.json").write_text(prompt[0])
    logger.info("%s holds %s, with its card in README.md", target, policy.title)


def require_pushable(name: str) -> None:
    """Raises ValueError unless a token is there and the name has the form of the Hub's."""
    if name.count("/") != 1:
        raise ValueError(f"{name!r} names no repository of the Hub; give ORG/NAME")
    if not os.environ.get("HF_TOKEN"):
        raise ValueError(f"there is no HF_TOKEN to push to {name} with; set it to a token that may write there")


def push(folder: Path, name: str) -> None:
    """Commits an exported folder to a repository of the Hub, or of HF_ENDPOINT; a new one is private.

    Raises ValueError if it does not take the folder.
    """
    hub = HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        commit = hub.upload_folder(repo_id=name, folder_path=folder, commit_message=f"{folder.name}, by agent_r1")
    except (HfHubHTTPError, HFValidationError) as fault:
        problem = f"{folder} is written, and {hub.endpoint} did not take it as {name}: {fault}"
        raise ValueError(f"{problem}; correct name or HF_TOKEN, and push it with `hf upload`") from fault
    logger.info("%s is at %s", folder, commit.commit_url)


def model_card(settings: Params, policy: Policy, license_name: str, prompt: tuple[str, str]) -> ModelCard:
    """The model card of a policy: its scores beside those of the baselines, its origin, and how to ask it."""
    base = settings.model.path
    dataset = settings.prepare.dataset
    scores = scores_of(settings, policy)
    folder = _evaluation_of(settings, policy)
    word = words_of(read_rows(settings.places.questions, Question)).right if scores else ""
    measure = word.replace(" ", "_")
    about = ModelCardData(
        license=license_name,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base or None,
        tags=["agent_r1", "reinforcement-learning", "tool-use"],
        model_name=policy.name,
        eval_results=[EvalResult("text-generation", dataset, dataset, measure, scores[THIS][SUCCESS])]
        if scores
        else None,
    )
    text = CARD.substitute(
        title=in_markdown(policy.title),
        base=f", from {in_markdown(base)}" if base else ", from a small model that was made for it",
        scored="\n".join(f"- {name}: {in_words(row, word)}" for name, row in scores.items()) or NOT_SCORED,
        answered=decoding(read_hashes(folder) if folder else {}).capitalize(),
        dataset=dataset,
        made="\n".join(f"- {name}: {in_markdown(value)}" for name, value in made_of(settings, policy).items() if value),
        prompt=prompt[0],
        reply=prompt[1],
    )
    return ModelCard(f"---\n{about.to_yaml()}\n---\n\n{text}")


def scores_of(settings: Params, policy: Policy) -> dict[str, Metrics]:
    """The headlines of a policy's latest evaluation, and of baselines with the same questions; {} without one."""
    places = settings.places
    own_folder = _evaluation_of(settings, policy)
    if own_folder is None:
        return {}
    folders = {THIS: own_folder} | {f"`{name}`{BESIDE.get(name, '')}": places.evaluation(name) for name in BASELINES}
    exam = _exam_of(own_folder)
    questions = read_rows(places.questions, Question)
    alike = {name: folder for name, folder in folders.items() if _exam_of(folder) == exam}
    return {name: read_scores(folder, questions, settings.evaluate) for name, folder in alike.items()}


def made_of(settings: Params, policy: Policy) -> dict[str, str]:
    """The origin of a policy, by name; "" for unknown facts."""
    facts = dict[str, str]()
    if policy.version:
        facts = asdict(policy.version.descriptor) | {"reference": policy.version.reference}
    elif policy.run:
        folder = settings.places.training(policy.run)
        start = read_start(folder)
        tracked = tracking.run_of(folder)
        facts = tracked.tags() if tracked else {}
        facts |= start.inputs | {"config": start.fingerprint} if start else {}
    return {
        "training": policy.run.label if policy.run else "",
        "updates": str(policy.updates),
        "sha256 of the weights' folder": model_hash(policy.path),
        "registered as": facts.get("reference", ""),
        "commit of the code": facts.get("git_commit", ""),
        "sha256 of the questions": facts.get("questions", ""),
        "sha256 of the passages": facts.get("passages", ""),
        "fingerprint of the configuration": facts.get("config", ""),
        "libraries": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
    }


def prompt_of(settings: Params, policy: Policy) -> tuple[str, str]:
    """The first data set's opening, as JSON that ends no code block, and a tool's message, as Python."""
    env = policy.as_trained(settings).env
    dialect = Chat(load_tokenizer(policy.path)).template.dialect
    opening = _opening(settings, env)
    messages, tools = dialect.put([("system", opening.system), ("user", "")], opening.tools)
    prompt = {
        "messages": [{"role": role, "content": content} for role, content in messages],
        "tools": list(tools) or None,
        "max_steps": env.max_steps,
        "max_action_tokens": env.max_action_tokens,
    }
    reply = '"tool", "content": answer' if dialect.observations else f'"user", "content": f"{IN_TAGS}"'
    return json.dumps(prompt, indent=2).replace("`", "\\u0060"), f'{{"role": {reply}}}'


def _opening(settings: Params, env: EnvParams) -> Env:
    """What the first question's episode begins with."""
    places = settings.places
    questions = read_rows(places.questions, Question)[:1]
    with Shared(env, open_index(settings.search, places.passages, places.index)) as shared:
        [opening] = openings(attempts_at(questions, shared), questions, shared)
    return opening


def _evaluation_of(settings: Params, policy: Policy) -> Path | None:
    """The latest evaluation of a version, or of any policy with these weights."""
    if policy.version:
        return latest_folder(policy.version, settings.places)
    weights = model_hash(policy.path)
    files = settings.places.evaluation("any").parent.glob(f"*/{EVALUATION_HASHES}")
    evaluations = [file for file in files if read_hashes(file.parent)[POLICY] == weights]
    return max(evaluations, key=lambda file: file.stat().st_mtime).parent if evaluations else None


def _exam_of(folder: Path) -> tuple[str, float, str] | None:
    """The hash and number of an evaluation's questions, and how they were answered; None if there is no evaluation."""
    hashes = read_hashes(folder)
    if not hashes:
        return None
    scores = json.loads((folder / "scores.json").read_text())
    return hashes["questions"], scores["questions"] + scores["aborted"], decoding(hashes)
