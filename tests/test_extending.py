"""The code of docs/extending.md does what the page says."""

import asyncio
import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from agent_r1.credit.batch import Batch
from agent_r1.credit.estimators import ESTIMATORS
from agent_r1.data.worlds import draw
from agent_r1.envs.shared import Shared
from agent_r1.faults import WorldFault
from agent_r1.outside.gym_env import GymEnv, require_gymnasium
from agent_r1.outside.toolbox_env import ToolboxEnv, require_toolbox
from agent_r1.params import Params, load
from agent_r1.params.credit import CreditParams
from agent_r1.params.places import RunId
from agent_r1.params.sections import override, validated
from agent_r1.records import CallStatus, Outcome, Passage
from agent_r1.search.index import build
from agent_r1.tables import write_rows
from agent_r1.tools.toolbox import Toolbox
from tests.outside.worlds import play

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's blocks define, run one after the other."""
    text = (ROOT / "docs/extending.md").read_text().partition("## In a notebook")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    names: dict[str, Any] = {"__name__": "extending"}
    exec(compile(code, "docs/extending.md", "exec"), names)
    return names


def test_the_tool(page: dict[str, Any]) -> None:
    calendar = page["calendar"]
    assert calendar.name == "years_between"
    assert calendar.schema["function"]["parameters"]["required"] == ["first", "second"]
    assert asyncio.run(calendar.call({"first": 1958, "second": 1990})).text == "32"
    assert asyncio.run(calendar.call({"first": 0, "second": 1990})).call_status is CallStatus.FAILED
    assert asyncio.run(calendar.call({"first": "1958", "second": 1990})).call_status is CallStatus.BAD_ARGUMENTS


def act(env: Any, action: str) -> Any:
    return asyncio.run(env.step(action))


def changed(changes: dict[str, Any]) -> Params:
    shipped = load(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
    return validated(Params, override(shipped, changes), "the page")


def test_tools_are_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/extending.md").read_text()
    code, lines = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL)[:2]
    (tmp_path / "my_tools.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = changed(yaml.safe_load(lines)).env
    assert [*env.tools.mcp] == ["files", "weather"]

    async def offered() -> list[str]:
        tools = env.tools.model_copy(update={"mcp": {}, "read": None, "search": None})
        async with Toolbox(env.model_copy(update={"tools": tools}), None) as toolbox:
            return [schema["function"]["name"] for schema in toolbox.schemas]

    assert asyncio.run(offered()) == ["calculator", "python", "years_between"]


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that offers the page's own tool alone, and has a model and an index."""
    text = (ROOT / "docs/extending.md").read_text()
    code, lines = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL)[:2]
    own = {"functions": yaml.safe_load(lines)["env"]["tools"]["functions"]}
    tools = dict.fromkeys(("read", "calculator", "python")) | own
    env = {"max_steps": 1, "max_tokens": 500, "max_action_tokens": 16, "tools": tools}
    settings = changed({"engine": {"kind": "transformers"}, "warm_start": {"demonstrations": 0}, "env": env})
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json", by_alias=True)))
    (tmp_path / "my_tools.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    places = settings.places
    write_rows(places.passages, [Passage(passage_id="p", title="Veld", text="Tesk is a city.")], Passage)
    build(settings.search, places.passages, places.index)
    places.warm_start.parent.mkdir()
    places.warm_start.symlink_to(tiny_model)
    return tmp_path


def typed(project: Path) -> subprocess.CompletedProcess[str]:
    """The page's command as a user types it, in a folder inside the project."""
    [line] = re.findall(r"^```\n(echo .*)\n```$", (ROOT / "docs/extending.md").read_text(), re.MULTILINE)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    return subprocess.run(line, shell=True, cwd=project / "data", env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow  # a process that imports all
def test_the_command_finds_what_lies_in_the_project(project: Path) -> None:
    done = typed(project)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 step, " in done.stdout


@pytest.mark.slow  # a process that imports all
def test_the_command_refuses_what_is_not_there_before_it_answers(project: Path) -> None:
    (project / "my_tools.py").write_text("")
    done = typed(project)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "env.tools.functions.years_between: my_tools has no 'years_between'" in done.stderr


def test_the_environment(page: dict[str, Any]) -> None:
    env = page["attempts"][0].env(0)
    assert act(env, "<answer>10</answer>").observations == ("higher",)
    assert act(env, "<answer>20</answer>").observations == ("lower",)
    assert act(env, "what?").call_status is CallStatus.MALFORMED
    found = act(env, "<answer>17</answer>")
    assert (found.outcome, found.answer) == (Outcome.ANSWERED, "17")
    assert found.rewards == {"em": 1.0, "saved": pytest.approx(3 / 7)}
    other = page["attempts"][-1].env(0)
    assert [act(other, "<answer>1</answer>").outcome for _ in range(7)] == [None] * 6 + [Outcome.TURN_LIMIT]


@pytest.fixture
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's class in a project's root, and the database that it reads."""
    section = (ROOT / "docs/extending.md").read_text().partition("## A world of your own")[2]
    (tmp_path / "shop.py").write_text(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0])
    (tmp_path / "data/raw").mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(tmp_path / "data/raw/shop.db")) as rows:
        rows.execute("create table orders (customer, item)")
        orders = [(f"C{order % 12}", f"I{order // 12 % 15}") for order in range(500)]
        rows.executemany("insert into orders values (?, ?)", orders)
        rows.commit()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_worlds_are_a_line_each(own_world: None) -> None:
    section = (ROOT / "docs/extending.md").read_text().partition("## An environment that others wrote")[2]
    params = changed(yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0]))
    taxi, shop = (draw(name, world)["test"][0] for name, world in params.prepare.worlds.items())
    declared = Shared(params.env)
    require_gymnasium([taxi], declared.limits)
    require_toolbox([shop], declared.limits)
    assert declared.limits.openenv["echo"].url == "http://127.0.0.1:8000"
    assert play(GymEnv(taxi, declared, 0), "north")[0].rewards["env"] == -1.0
    env = ToolboxEnv(shop, declared, 0)
    counted, written = "select count(*) from orders where customer = 'C0' and item = 'I10'", "drop table orders"
    seen, found, refused, last = play(env, call("tables"), call("query", sql=counted), call("query", sql=written), "3")
    assert env.user == "Answer from the database.\n\nHow many orders of C0 are for a I10?"
    assert (seen.observations, found.observations) == (("[('CREATE TABLE orders (customer, item)',)]",), ("[(3,)]",))
    assert (refused.call_status, last.outcome) == (CallStatus.FAILED, Outcome.ANSWERED)
    assert (last.rewards["env"], last.rewards["success"]) == (1.0, 1.0)
    assert play(ToolboxEnv(shop, declared, 0), "2")[0].rewards["success"] == 0.0


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_reward_part(page: dict[str, Any]) -> None:
    steps = [SimpleNamespace(action_start=2, action_stop=12), SimpleNamespace(action_start=20, action_stop=220)]
    trajectory = SimpleNamespace(steps=steps)
    np.testing.assert_allclose(page["brief"](trajectory), [0.9, 0.0])


def test_the_rewards_of_ones_own(page: dict[str, Any]) -> None:
    episode = SimpleNamespace(
        steps=[SimpleNamespace(action="one two three"), SimpleNamespace(action="four")],
        question=SimpleNamespace(text="Where?"),
        answer="Tesk",
    )
    assert page["brevity"](episode) == pytest.approx(0.6)
    page["ask_the_judge"] = lambda question, answer: 0.5
    assert page["judged"]([episode]) == [0.5]

    def silent(question: str, answer: str) -> float:
        raise TimeoutError

    page["ask_the_judge"] = silent
    with pytest.raises(WorldFault, match="the judge does not answer"):
        page["judged"]([episode])


def test_the_estimator(page: dict[str, Any]) -> None:
    on = np.array([[False, True, True]] * 4)
    batch = Batch(
        rewards=np.array([[0, 0, 1.0], [0, 0, 0.0], [0, 0, 0.0], [0, 0, 5.0]]),
        values=None,
        steps=np.where(on, 0, -1).astype(np.int32),
        time_steps=on,
        whitening_mask=on,
        critic_mask=on,
        groups=np.array([3, 3, 3, 8]),
    )
    estimator: Callable[[Batch, CreditParams], Any] = page["group_median"]
    found = estimator(batch, load(ROOT / "params.yaml").run(RunId("grpo")).credit).advantages
    np.testing.assert_allclose(found, [[0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert estimator.__name__ not in ESTIMATORS, "the page shows how to add one that is not there"


@pytest.mark.slow  # it trains twice, in a process of its own
def test_a_notebook_trains_and_asks(tiny_model: Path, tmp_path: Path) -> None:
    """The page's cell as it stands, where an event loop runs and code has no file, as in a kernel."""
    section = (ROOT / "docs/extending.md").read_text().partition("## In a notebook")[2]
    [cell, *_] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen/Qwen2.5-0.5B-Instruct").symlink_to(tiny_model)
    again = "years = trainer.train()\nprint(history.equals(years), len(years), years['reward/brevity'].min() > 0)\n"
    asked = "print(trainer.policy == os.path.abspath('years/checkpoint/policy'), steps[-1].outcome is not None)\n"
    kernel = (
        f"import asyncio, os\nasync def run():\n    exec({cell + again + asked!r}, globals())\nasyncio.run(run())\n"
    )
    done = subprocess.run([sys.executable, "-c", kernel], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True 2 True\nTrue True\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "most"), [("flock", 20), ("riddle", 8), ("game", 15), ("vf_agent", 15), ("inspect_agent", 15)]
)
def test_an_example_in_a_package_of_others_is_short(name: str, most: int) -> None:
    """`python -m benchmarks.frameworks.pages` plays it, where its package is."""
    text = (ROOT / "docs/environments.md").read_text()
    [code] = re.findall(rf"```python\n# {name}\.py\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= most
    compile(code, name, "exec")
