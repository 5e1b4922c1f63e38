"""TRL's side of the race, run by the interpreter of its environment: `GRPOTrainer(tools=...)`, whose steps take turns.

What the project's run has and TRL knows is set alike: questions and their order, samples, prompts, tools, the limits of
an action and of an episode, learning rate, clipping, threads. The chat template is the built-in one and writes calls
too, which TRL keeps apart from the text. TRL generates with transformers: it hands weights
to vLLM over NCCL, or by a call that vLLM on a CPU does not have.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from agent_r1.answers import exact_match
from agent_r1.envs.tool_env import SYSTEM
from agent_r1.learn.model import load_tokenizer
from agent_r1.params import Params, RunId
from agent_r1.records import Question, of_split
from agent_r1.search.index import Cached, open_index
from agent_r1.tables import read_rows
from agent_r1.tools.search import render_passages
from agent_r1.training.questions import draw
from benchmarks.peers.course import FIRST, RUN, await_turn, settings_of, tell_lap

ROWS = 8  # of a micro-batch, which is what TRL takes by default; 16 and 32 were no faster
_SAID = 'message.content + "<|im_end|>\\n" }}\n{%- endif %}'
_SAID_AND_CALLED = """message.content }}
{%- for call in message.tool_calls or [] %}
{{- "<tool_call>" + (call.function | tojson) + "</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}"""


class Turns(TrainerCallback):
    """Has every step wait for its turn, and say what it did."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of each trajectory of the step
        self.rewards: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        await_turn()

    def on_step_end(self, *_: object, **__: object) -> None:
        tell_lap(
            trajectories=len(self.tokens),
            tokens=sum(self.tokens),
            trained_tokens=sum(self.tokens),
            success=sum(self.rewards) / len(self.rewards),
        )

    def right(
        self,
        completions: Sequence[Sequence[dict[str, Any]]],
        completion_ids: Sequence[Sequence[int]],
        answers: Sequence[list[str]],
        prompt_tokens: Sequence[int],
        **_: object,
    ) -> list[float]:
        """The reward: 1 for an answer that matches exactly, else 0."""
        said = [re.search("<answer>(.*?)</answer>", each[-1]["content"] or "", re.DOTALL) for each in completions]
        self.rewards = [float(bool(it and exact_match(it[1], gold))) for it, gold in zip(said, answers, strict=True)]
        self.tokens = [before + len(ids) for before, ids in zip(prompt_tokens, completion_ids, strict=True)]
        return self.rewards


def tokenizer_of(settings: Params) -> PreTrainedTokenizerFast:
    """The warm start's, as TRL reads and writes with it. Raises RuntimeError where its template is another."""
    tokenizer = load_tokenizer(settings.places.warm_start)
    before, written, after = tokenizer.chat_template.partition(_SAID)
    if not written:
        raise RuntimeError("the chat template of the warm start is not the built-in one")
    tokenizer.chat_template = before + _SAID_AND_CALLED + after
    tokenizer.response_template = qwen3_template
    return tokenizer


def search_of(index: Cached, top_k: int) -> Any:
    def search(query: str) -> str:
        """Finds passages about a query.

        Args:
            query: What is looked for.
        """
        [passages] = index.search([query], top_k)
        return render_passages(passages) or "nothing found"

    return search


def rows_of(settings: Params, tokenizer: PreTrainedTokenizerFast, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The questions of all iterations, in their order."""
    run, rows = settings.run(RunId(RUN)), list[dict[str, Any]]()
    questions = of_split(read_rows(settings.places.questions, Question), "train")
    for iteration in range(run.iterations):
        for each in draw(questions, run.rollout.questions, iteration=iteration, seed=run.seed):
            prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": each.text}]
            ids = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=False)
            rows.append({"prompt": prompt, "answers": each.answers, "prompt_tokens": len(ids)})
    return rows


def config_of(settings: Params, folder: str) -> GRPOConfig:
    run, env = settings.run(RunId(RUN)), settings.env
    batch = run.rollout.questions * run.rollout.samples
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=run.rollout.samples,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=batch // ROWS,
        max_completion_length=env.max_tokens,
        max_tool_calling_iterations=env.max_steps - 1,
        generation_kwargs={"max_new_tokens": env.max_action_tokens},
        temperature=1.0,
        learning_rate=run.update.learning_rate,
        epsilon=run.update.clip_low,
        epsilon_high=run.update.clip_high,
        max_grad_norm=run.update.max_grad_norm,
        max_steps=run.iterations,
        shuffle_dataset=False,
        seed=run.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    settings = settings_of(FIRST)
    torch.set_num_threads(settings.model.threads)
    places, tokenizer, turns = settings.places, tokenizer_of(settings), Turns()
    index = open_index(settings.search, places.passages, places.index)
    tools = [search_of(index, settings.env.top_k)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(places.warm_start),
            args=config_of(settings, folder),
            train_dataset=Dataset.from_list(rows_of(settings, tokenizer, tools)),
            processing_class=tokenizer,
            tools=tools,
            reward_funcs=turns.right,
            callbacks=[turns],
        )
        trainer.train()


if __name__ == "__main__":
    main()
