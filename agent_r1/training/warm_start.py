"""The policy that reinforcement learning starts from: a model that was shown demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agent_r1.data.demonstrations import Demonstration, with_tools, without_tools
from agent_r1.data.questions import make_plans
from agent_r1.envs import tool_env
from agent_r1.params import Params
from agent_r1.policy import builtin
from agent_r1.policy.model import default_device, load_agent
from agent_r1.policy.warm_start import fit
from agent_r1.records import Passage, Question, Trajectory
from agent_r1.rollout.attempts import naive_rag_attempts, tool_attempts
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import ScriptedSampler, collect
from agent_r1.search.base import Search


def train_on_demonstrations(
    settings: Params, questions: Sequence[Question], passages: Sequence[Passage], index: Search
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model and its tokenizer, trained on demonstrations of the questions.

    Without `model.path` both are the built-in small ones, made from scratch, and the tokenizer learns its words from
    passages and demonstrations; with it, those of that folder or hub id. The demonstrator searches the index.
    """
    plan_of, facts = make_plans(settings.prepare, questions)
    searching = with_tools(questions, plan_of, facts, settings.warm_start)
    answering = without_tools(questions, plan_of, index, settings.env.top_k, settings.warm_start)
    if settings.model.path:
        model, tokenizer = load_agent(settings.model.path)
    else:
        model, tokenizer = _built_in(settings, passages, [*searching, *answering])
    demonstrations = _act_out(searching, answering, Chat(tokenizer), index, settings)
    torch.nn.Module.to(model, default_device())
    fit(model, demonstrations, settings.warm_start)
    return model, tokenizer


def _built_in(
    settings: Params, passages: Sequence[Passage], demonstrations: Sequence[Demonstration]
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    shape = settings.warm_start
    tokenizer = builtin.train_tokenizer(_texts(passages, demonstrations), shape.vocab_size)
    model = builtin.new_model(
        tokenizer,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        max_tokens=settings.env.max_tokens,
        seed=shape.seed,
    )
    return model, tokenizer


def _texts(passages: Sequence[Passage], demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """What the tokenizer learns its words from: the passages, and the conversations with all that surrounds them."""
    for passage in passages:
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
    limits, trajectories = settings.env, list[Trajectory]()
    for demonstrations, make_attempts in ((searching, tool_attempts), (answering, naive_rag_attempts)):
        trajectories += collect(
            ScriptedSampler([each.actions for each in demonstrations], chat),
            chat,
            make_attempts([each.question for each in demonstrations], index, limits),
            max_tokens=limits.max_tokens,
            max_action_tokens=limits.max_tokens,  # the demonstrator finishes what it writes
            seed=settings.warm_start.seed,
        )
    return trajectories
