"""Texts of a model that somebody serves, as actions in the chat's tokens."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.evaluation.protocols import EndpointSampler
from agent_r1.http.endpoint import Endpoint, Reply
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.sampling import Request
from tests.cases import cases


class Saying(Endpoint):
    """Says the same to everything."""

    def __init__(self, text: str, *, cut: bool = False) -> None:
        self.url, self._reply, self.asked = "http://h/v1", Reply(text, cut), 0

    def complete(self, model: str, messages: Sequence[tuple[str, str]], options: Mapping[str, float]) -> Reply:
        self.asked += 1
        return self._reply


@cases("text, cut, most, read")
def test_a_text_becomes_an_action_within_its_limit(chat: Chat, text: str, cut: bool, most: int, read: str) -> None:
    sampler = EndpointSampler(Saying(text, cut=cut), "m", chat, concurrency=2)
    request = Request(episode=0, step=0, context=[5, 6], seed=0, max_tokens=most)
    [action] = sampler.sample([request])
    assert chat.decode(action.token_ids) == read
    assert not action.logprobs.any()
    assert asyncio.run(sampler.act(request)).token_ids == action.token_ids


def test_an_answer_is_kept_for_the_same_request_alone(chat: Chat, tmp_path: Path) -> None:
    """The last line was cut short by a kill, and is asked for again."""
    requests = [
        Request(episode=0, step=0, context=[5], seed=seed, max_tokens=most, messages=[("user", said)])
        for seed, most, said in [(1, 9, "a"), (2, 9, "a"), (1, 8, "a"), (1, 9, "b")]
    ]
    kept, saying = tmp_path / "m.answers.jsonl", Saying("\u2028 <answer>Kr\xe5kan\n")
    first = EndpointSampler(saying, "m", chat, concurrency=1, kept=kept).sample(requests)
    kept.write_bytes(kept.read_bytes()[:-9])
    again = EndpointSampler(saying, "m", chat, concurrency=1, kept=kept).sample(requests)
    assert saying.asked == 5
    assert repr(again) == repr(first)
    EndpointSampler(saying, "m", chat, concurrency=1, kept=kept).sample(requests)
    EndpointSampler(saying, "other", chat, concurrency=1, kept=kept).sample(requests[:1])
    assert saying.asked == 6
