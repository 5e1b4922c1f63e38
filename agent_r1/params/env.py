"""`env`: the tools, games, contexts and others' environments that training and evaluation share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agent_r1.params.agents import AgentParams
from agent_r1.params.games import GamesParams
from agent_r1.params.outside import OthersWorlds
from agent_r1.params.sections import Count, Name, Natural, Needs, Refusals, Section, Share, nearest
from agent_r1.params.tools import ToolsParams

# When the requests of episodes leave for the engine; see `agent_r1.rollout.episodes`.
Order = Literal[
    "rounds",  # when every episode that lives has asked
    "arrival",  # as soon as its episode has it
    "exact_arrival",  # so too, and a training is refused unless an action is then shown to be the same in any company
]


# The texts that are answers.
Answers = Literal[
    "tagged",  # between <answer> and </answer>
    "plain",  # also a whole action without a tool call
]


# The texts that are calls.
Calls = Literal[
    "strict",  # in the form of the chat template or of Hermes
    "lenient",  # also bare or fenced JSON, a list, `parameters`, no arguments, no closing mark; see `rollout.calls`
]


DECLARE = "; declare it there"
REWRITES = "set it to the exchanges of a window, or to the steps between two summaries"


class ContextParams(Section):
    """The part of an episode that the policy reads; see `agent_r1.rollout.episode`."""

    needs = (Needs("every", 0, "kind", ("window", "summary"), ", which keeps everything", REWRITES),)

    kind: Literal["append", "window", "summary"]
    every: Natural

    def within(self, max_steps: int) -> Refusals:
        """Refuses a rule under which an episode ends before its context is rewritten."""
        steps = 2 if self.kind == "window" else 1  # steps that the last rewriting leaves, at least
        if self.every > max_steps - steps:
            setting = f"every {self.every} has no effect with kind: {self.kind} and max_steps {max_steps}"
            yield f"{setting}, which end an episode before its context is rewritten; lower it, or raise max_steps"


class EnvParams(OthersWorlds):
    agents: dict[Name, AgentParams] = Field(default={})
    agent: Name | None = None  # of `agents`, the one that answers questions; null is the loop of this project
    instructions: str
    examples: str  # a file of conversations that open every context; "" for none
    answers: Answers
    tools: ToolsParams
    max_result_characters: Count
    top_k: Count
    max_steps: Count
    max_tokens: Count
    max_action_tokens: Count
    context: ContextParams
    parallel_calls: Count
    calls: Calls
    aborted_share: Share
    too_long_share: Share
    order: Order
    games: GamesParams

    def refusals(self) -> Refusals:
        if self.agent is not None and self.agent not in self.agents:
            close = nearest(self.agent, self.agents) if self.agents else DECLARE
            yield f"agent is {self.agent!r}, which env.agents does not define{close}"
        if self.agent is not None:
            yield from self.of_agent(self.agent)
        for name, agent in self.agents.items():
            if agent.examples and not self.examples:
                yield f"agents.{name}.examples has no effect without env.examples; name a file there, or leave it out"
        read = self.tools.read
        if read and read.part_characters >= self.max_result_characters:
            setting = f"tools.read.part_characters {read.part_characters}"
            yield f"{setting} would be cut at max_result_characters {self.max_result_characters}; make parts smaller"
        if self.max_action_tokens >= self.max_tokens:
            setting = f"max_action_tokens {self.max_action_tokens}"
            yield f"{setting} leaves no room for a prompt in max_tokens {self.max_tokens}; raise max_tokens"
        yield from (f"context.{problem}" for problem in self.context.within(self.max_steps))

    def of_agent(self, name: str) -> Refusals:
        """Refuses settings that an agent outside cannot play under, or that change nothing of how it does."""
        if self.order == "rounds":
            why = "would wait for episodes of an agent outside that have not begun"
            yield f"order: rounds {why}, and agent is {name!r}; set it to arrival or exact_arrival"
        if self.context.kind != "append":
            why = f"has no effect on the agent outside {name!r}, which writes its contexts itself"
            yield f"context.kind: {self.context.kind} {why}; set it to append"
