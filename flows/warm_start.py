"""The warm start stage: `python -m flows.warm_start`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from agent_r1 import params
from agent_r1.data.demonstrations import Demonstration, with_tools, without_tools
from agent_r1.data.questions import make_plans
from agent_r1.envs import tool_env
from agent_r1.params import Params
from agent_r1.policy import builtin, memory
from agent_r1.policy.model import default_device, load_agent
from agent_r1.policy.warm_start import fit
from agent_r1.project import INDEX, PASSAGES, QUESTIONS, WARM_START
from agent_r1.records import Passage, Question, Trajectory
from agent_r1.rollout.attempts import naive_rag_attempts, tool_attempts
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.base import Search
from agent_r1.search.index import open_index
from agent_r1.tables import read_rows
from flows.stage import accelerator

logger = logging.getLogger(__name__)


def warm_start() -> None:
    """Writes the policy that reinforcement learning starts from, as a Hugging Face folder.

    Without `model.path` it is the built-in small model, trained from scratch on demonstrations; with it, that model,
    passed through or, with `warm_start.fine_tune`, trained on the demonstrations too.
    """
    settings = params.load()
    with accelerator():
        if settings.model.path:
            _check_memory(settings, settings.model.path)
        if settings.model.path and not settings.warm_start.fine_tune:
            model, tokenizer = load_agent(settings.model.path, "auto", torch.device("cpu"))
            logger.info("passing %s through", settings.model.path)
        else:
            model, tokenizer = _train(settings)
        model.save_pretrained(WARM_START)
        tokenizer.save_pretrained(WARM_START)


def _check_memory(settings: Params, path: str) -> None:
    """Refuses a model that is too large for this machine, before it is loaded: for the runs, and to be fine-tuned."""
    config = AutoConfig.from_pretrained(path)
    memory.check(config, settings, [settings.run(run) for run in settings.repro_runs])
    if settings.warm_start.fine_tune:
        demand = memory.demand_of_fit(config, settings.warm_start.batch_size * settings.env.max_tokens)
        memory.require_fit(memory.estimate(demand), memory.available_gib(default_device()))


def _train(settings: Params) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    index = open_index(settings.search, PASSAGES, INDEX)
    questions = [row for row in read_rows(QUESTIONS, Question) if row.split == "train"]
    plan_of, facts = make_plans(settings.prepare, questions)
    searching = with_tools(questions, plan_of, facts, settings.warm_start)
    answering = without_tools(questions, plan_of, index, settings.env.top_k, settings.warm_start)
    if settings.model.path:
        model, tokenizer = load_agent(settings.model.path)
    else:
        model, tokenizer = _built_in(settings, [*searching, *answering])
    demonstrations = _act_out(searching, answering, Chat(tokenizer), index, settings)
    torch.nn.Module.to(model, default_device())
    fit(model, demonstrations, settings.warm_start)
    return model, tokenizer


def _built_in(
    settings: Params, demonstrations: Sequence[Demonstration]
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    shape = settings.warm_start
    tokenizer = builtin.train_tokenizer(_texts(demonstrations), shape.vocab_size)
    model = builtin.new_model(
        tokenizer,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        max_tokens=settings.env.max_tokens,
        seed=shape.seed,
    )
    return model, tokenizer


def _texts(demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """What the tokenizer learns its words from: the passages, and the conversations with all that surrounds them."""
    for passage in read_rows(PASSAGES, Passage):
        yield f"{passage.title}: {passage.text}"
    for demonstration in demonstrations:
        yield "\n".join(["system", tool_env.SYSTEM, "Tools: search(query)", "user", demonstration.question.text])
        yield "\n".join(["system", tool_env.FROM_PASSAGES, *("assistant\n" + act for act in demonstration.actions)])


def _act_out(
    searching: Sequence[Demonstration],
    answering: Sequence[Demonstration],
    chat: Chat,
    index: Search,
    settings: Params,
) -> list[Trajectory]:
    """The demonstrations as trajectories, made by the loop and the renderer that make the policy's own."""
    limits = settings.env
    parts = [
        (searching, tool_attempts([each.question for each in searching], index, limits)),
        (answering, naive_rag_attempts([each.question for each in answering], index, limits)),
    ]
    return [
        trajectory
        for demonstrations, attempts in parts
        for trajectory in collect(
            ScriptedSampler([each.actions for each in demonstrations], chat),
            chat,
            attempts,
            max_tokens=limits.max_tokens,
            max_action_tokens=limits.max_tokens,  # the demonstrator finishes what it writes
            seed=settings.warm_start.seed,
        )
    ]


if __name__ == "__main__":
    from flows.stage import run_stage

    run_stage(warm_start)
