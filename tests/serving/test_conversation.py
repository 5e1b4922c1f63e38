"""What a conversation looks like, on a terminal and elsewhere, and what untrusted text cannot do to it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from agent_r1.params import SHIPPED, Params, load
from agent_r1.records import Call, CallStatus, Outcome, Passage, Question, Step, StopReason
from agent_r1.rollout.episode import StepView
from agent_r1.serving.conversation import Screen, introduction
from agent_r1.serving.wire import Limits
from agent_r1.tables import write_rows
from tests.cases import cases
from tests.trajectories import question_fields

LIMITS = Limits(max_steps=5, max_tokens=512, parallel_calls=1)
THOUGHT = "The director first."
CALL = f'<think>{THOUGHT}</think><tool_call>{{"name": "search", "arguments": {{"query": "Low Tide"}}}}</tool_call>'
FOUND = "Low Tide: Low Tide is a film by Mara Quill.\nMara Quill: Mara Quill was born in Tesk."


def view(
    action: str,
    observation: str = "",
    *,
    call: Call | None = None,
    stop_reason: StopReason = StopReason.END,
    **fields: Any,
) -> StepView:
    calls = [call] if call else []
    step = Step(action_start=40, action_stop=104, stop_reason=stop_reason, calls=calls, rewards={})
    plain = {"outcome": None, "answer": "", "fault": "", "tokens": 200, **fields}
    return StepView(step=step, action=action, observations=(observation,) if observation else (), **plain)


def view_of(fields: dict[str, Any]) -> StepView:
    """The view of a case."""
    kinds = {
        "outcome": Outcome,
        "stop_reason": StopReason,
        "call": lambda call: Call(**call | {"status": CallStatus(call["status"])}),
    }
    return view(**{name: kinds.get(name, str)(value) for name, value in fields.items()})


def search(observation: str = FOUND, query: str = "Low Tide", outcome: Outcome | None = None) -> StepView:
    call = Call(tool="search", arguments=f'{{"query": "{query}"}}', status=CallStatus.OK)
    return view(CALL, observation, call=call, outcome=outcome)


def printed(*views: StepView, terminal: bool = False, width: int = 40) -> str:
    """The output, on a terminal of that width or in a file, with an ending if the last step has an outcome."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system="standard" if terminal else None, highlight=False
    )
    screen = Screen(console, LIMITS)
    for view in views:
        screen.step(view)
    if views[-1].outcome:
        screen.ending(views, 1.25)
    return file.getvalue()


def test_terminal_cuts_passages_to_its_width_and_styles_parts() -> None:
    text = printed(search(), terminal=True, width=30)
    lines = text.splitlines()
    assert "\x1b[2;3mThe director first." in text  # dim, italic
    assert "\x1b[1;36mLow Tide" in text  # bold, cyan
    [film, person] = [line for line in lines if "…" in line]  # 30 columns, 4 of them margin
    assert film.rstrip() == "    \x1b[1mLow Tide\x1b[0m: Low Tide is a f…"
    assert person.rstrip() == "    \x1b[1mMara Quill\x1b[0m: Mara Quill wa…"


@cases("last, reason")
def test_episode_without_answer_gives_reason(last: dict[str, Any], reason: str) -> None:
    assert f"  none    no answer: {reason}" in printed(view_of(last)).splitlines()


@cases("steps, lines")
def test_episode_in_a_file_is_whole_and_plain(steps: list[dict[str, Any]], lines: list[str]) -> None:
    assert printed(*map(view_of, steps)).splitlines() == lines


@pytest.mark.parametrize("terminal", [False, True])
def test_markup_in_passage_stays_text(terminal: bool) -> None:
    text = printed(search("A [red]b: [bold]x[/] :smile: [/nothing]"), terminal=terminal, width=80)
    assert "A [red]b" in text
    assert "[bold]x[/] :smile: [/nothing]" in text
    assert "\x1b[31m" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_escape_sequences_do_not_reach_terminal(terminal: bool) -> None:
    """In a passage, a query and a thought: colours, a new title, a cleared screen, C1 controls, reversed text."""
    evil = "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b1m over\u202eback\x08"
    action = CALL.replace(THOUGHT, f"{evil}\r...")
    call = Call(tool="search", arguments='{"query": "\\u001b[31mq"}', status=CallStatus.OK)
    text = printed(view(action, f"T: {evil}", call=call), terminal=terminal, width=120)
    assert "\ufffd[31mred\ufffd]0;title\ufffd\ufffd[2J\ufffd1m overback\ufffd" in text
    assert "\ufffd[31mq" in text
    assert not set("\x07\x08\r\x9b\u202e") & set(text)
    assert "\x1b[31m" not in text
    assert terminal or "\x1b" not in text


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Params:
    """Of a project with two questions, a passage, and a policy of 60,000 weights in its root."""
    monkeypatch.chdir(tmp_path)
    settings = load(SHIPPED)
    rows = [
        Question(**question_fields(question_id=split, split=split, text=text))
        for split, text in (("train", "Who directed Low Tide?"), ("test", "Where was Mara Quill born?"))
    ]
    write_rows(settings.places.questions, rows, Question)
    write_rows(settings.places.passages, [Passage(passage_id="0", title="Tesk", text="A city.")], Passage)
    save_file({"weight": np.zeros((200, 300), np.float32)}, "model.safetensors")
    return settings


def test_introduction_has_size_and_words_of_the_data_of_a_built_in_model_alone(settings: Params) -> None:
    about, words = introduction(settings, Path(), built_in=True)
    assert about == ["It has 0.1 million weights, and knows atlas alone. Ask it such as:", "Where was Mara Quill born?"]
    assert words == {*["who", "directed", "low", "tide", "where", "was", "mara", "quill", "born", "tesk", "city"]}
    about, words = introduction(settings, Path("owner/name"), built_in=False)
    assert (about[1:], words) == (["Where was Mara Quill born?"], set())
    settings.places.questions.unlink()
    assert introduction(settings, Path(), built_in=True) == ([], set())
