"""What MLflow's pages on agents show: test questions as evaluation data sets, and prompts; each is stored once."""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.records import Question
from agent_r1.tracking.store import allowed, open_store

HASH = "sha256"  # a tag, of what is whole
OF_EXPERIMENTS = "_mlflow_experiment_ids"  # MLflow's tag of a prompt, by which the page of an experiment lists it


def keep_questions(name: str, digest: str, questions: Sequence[Question]) -> None:
    """Stores questions with their right answers as the evaluation data set of that name, whose version is a hash."""
    client, experiment = open_store()
    with allowed("the evaluation data set", client):
        stored = client.search_datasets([experiment], f"name = '{name}'")
        dataset = stored[0] if stored else client.create_dataset(name, [experiment])
        if dataset.tags.get(HASH) != digest:
            rows = [{"inputs": {"question": row.text}, "expectations": {"answers": row.answers}} for row in questions]
            dataset.merge_records(rows)
            client.set_dataset_tags(dataset.dataset_id, {HASH: digest})


def keep_prompt(run_id: str, name: str, digest: str, text: str) -> None:
    """Stores what opened an episode as a version of a prompt, by its hash, and names it among the run's.

    The hash is of all of it but the question.
    """
    client, experiment = open_store()
    with allowed("the prompt", client):
        prompts = f"name = '{name}' AND tags.`mlflow.prompt.is_prompt` = 'true'"  # else MLflow leaves them out
        stored = client.search_model_versions(f"{prompts} AND tags.{HASH} = '{digest}'")
        tags = {HASH: digest, OF_EXPERIMENTS: f",{experiment},"}
        number = stored[0].version if stored else client.register_prompt(name, text, tags=tags).version
        client.link_prompt_version_to_run(run_id, f"prompts:/{name}/{number}")
