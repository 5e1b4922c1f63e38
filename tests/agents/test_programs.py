"""Agents' programs as real processes: honest ones, and ones that would get away from a naive keeper."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from agent_r1 import own_code
from agent_r1.agents import programs, supervisor
from agent_r1.agents.programs import Programs
from agent_r1.agents.task import Ending, Task
from agent_r1.params.agents import AgentParams
from tests.answering import wait_for
from tests.cases import cases

T = TypeVar("T")
TASK = Task(
    question_id="q1",
    text="who?",
    setup={"row": 3},
    strata={"hops": "2"},
    base_url="http://127.0.0.1:9/v1",
    key="sk-client-key",
    reward_key="sk-reward-key",
    model="policy",
)
MODULE = """
import asyncio, json, os, random, subprocess, sys, time
random.seed(0)

async def shares(task):
    if task.text == "blocks":
        while True:
            pass
    if task.text == "waits":
        await asyncio.sleep(60)
    if task.text == "swallows":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if task.text == "exits":
        sys.exit(3)
    if task.text == "dies":
        os._exit(3)
    if task.text == "lasts":
        await asyncio.sleep(0.5)
    return {"answer": f"{os.getpid()} {task.key}", "parts": {"speed": 1}}

def alone(task):
    print("no outcome")
    if task.text == "blocks":
        while True:
            pass
    if task.text == "raises":
        raise ValueError(f"the key {task.reward_key} is wrong")
    if task.text == "object":
        return {1, 2}
    if task.text == "child":
        subprocess.Popen(["sleep", "86399"], start_new_session=True)
    if task.text == "nothing":
        return None
    return f"{os.getpid()} {sorted(os.environ)} {os.listdir()} {task.setup['row']}"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The root of a project with agents of its own; no process may be left when its test ends."""
    monkeypatch.chdir(tmp_path)
    Path("own_agents.py").write_text(MODULE)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield tmp_path
    assert [child for child in psutil.Process().children(recursive=True) if child.pid not in before] == []
    assert processes_of(tmp_path) == []
    assert not Path("episodes").exists()


def processes_of(root: Path, command: str = "") -> list[psutil.Process]:
    """The processes that work below a folder, or name it in their command. Each command holds the text `command`."""
    found = []
    for process in psutil.process_iter():
        try:
            line, folder = " ".join(process.cmdline()), process.cwd()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if str(root) in line + folder and command in line and process.pid != os.getpid():
            found.append(process)
    return found


def script(text: str, **further: Any) -> AgentParams:
    return AgentParams(command=[sys.executable, "-I", "-S", "-c", text], **{"timeout_s": 60.0, **further})


def shell(text: str, **further: Any) -> AgentParams:
    return AgentParams(command=["sh", "-c", text], **{"timeout_s": 60.0, **further})


def during(agent: AgentParams, act: Callable[[Programs], Awaitable[T]], concurrency: int = 64) -> T:
    """What comes of an act while a stage has an agent's programs open."""

    async def stage() -> T:
        async with Programs({"mine": agent}, concurrency, Path("episodes")) as programs_of_stage:
            return await act(programs_of_stage)

    return asyncio.run(stage())


def played(agent: AgentParams, *tasks: Task, concurrency: int = 64) -> list[Ending]:
    return during(agent, lambda opened: asyncio.gather(*(opened.play("mine", task) for task in tasks)), concurrency)


def asking(*texts: str) -> list[Task]:
    return [replace(TASK, text=text, key=f"sk-key-{number}") for number, text in enumerate(texts)]


QUESTION = {"id": "q1", "text": "who?", "setup": {"row": 3}, "strata": {"hops": "2"}}


def test_a_command_is_told_of_its_episode_and_of_nothing_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("KEPT", "2")
    told = "import json, os, sys; told = [json.load(sys.stdin), dict(os.environ), os.getcwd(), os.listdir()]"
    says = f"{told}; print('a log'); print(json.dumps({{'answer': json.dumps(told)}}))"
    [ending] = played(script(says, environment=["GIVEN"]), TASK)
    asked, variables, folder, files = json.loads(ending.answer or ending.fault)
    assert asked == {"question": QUESTION, "reward_key": "sk-reward-key"}
    variables.pop("LC_CTYPE", None)  # which Python itself sets
    openai = {"BASE_URL": "http://127.0.0.1:9/v1", "API_KEY": "sk-client-key", "MODEL": "policy"}
    anthropic = openai | {"BASE_URL": "http://127.0.0.1:9"}
    clients = {"OPENAI": openai, "ANTHROPIC": anthropic}
    of_clients = {f"{name}_{key}": value for name, client in clients.items() for key, value in client.items()}
    assert variables == {"GIVEN": "1", **of_clients}
    assert (Path(folder).parent, files) == (home / "episodes", [])


def test_the_last_line_is_what_came_of_it(home: Path) -> None:
    said = '{"answer": "a\\u00e9", "success": true, "parts": {"speed": 2}}'
    [ending] = played(shell(f"echo before; echo '{said}'; echo; echo", rewards=["speed"]), TASK)
    assert ending == Ending(answer="aé", success=True, parts={"speed": 2.0})
    assert played(shell("cat >/dev/null"), TASK) == [Ending()]


@cases("said, fault")
def test_another_last_line_is_a_fault(home: Path, said: str, fault: str) -> None:
    Path("said").write_text(said)
    [ending] = played(AgentParams(command=["cat", "said"], timeout_s=60, rewards=["speed"]), TASK)
    assert fault in ending.fault
    assert ending == Ending(fault=ending.fault)


@cases("does, fault")
def test_fault_shows_last_words_and_no_key(home: Path, monkeypatch: pytest.MonkeyPatch, does: str, fault: str) -> None:
    monkeypatch.setenv("MY_TOKEN", "correct horse")
    [ending] = played(shell(does, environment=["MY_TOKEN", "PATH"]), TASK)
    assert fault in ending.fault
    assert "sk-client" not in ending.fault


@cases("does")
def test_a_process_that_never_ends_is_ended_with_all_that_it_started(home: Path, does: str) -> None:
    [ending] = played(shell(f"cd {home}; {does}", timeout_s=0.5, environment=["PATH"]), TASK)
    assert ending.fault.startswith("it took longer than 0.5 s")


def test_what_a_process_leaves_behind_ends_before_its_episode_is_over(home: Path) -> None:
    leaves = f"cd {home}; setsid sh -c '(setsid sleep 86399 &)'; sleep 86399 & setsid sleep 86399 & echo '{{}}'"

    async def play(opened: Programs) -> tuple[Ending, list[psutil.Process]]:
        return await opened.play("mine", TASK), processes_of(home, "sleep")

    assert during(shell(leaves, environment=["PATH"]), play) == (Ending(), [])


def test_output_without_end_takes_no_memory(home: Path) -> None:
    wrote = "import sys; [sys.stdout.write('x' * 2**20) for _ in range(100)]; print(); print('{\"success\": true}')"
    sizes = list[int]()

    async def play(opened: Programs) -> Ending:
        playing = asyncio.create_task(opened.play("mine", TASK))
        while not playing.done():
            await asyncio.sleep(0.02)
            with suppress(psutil.Error):
                sizes.extend(each.memory_info().rss for each in processes_of(home, "supervisor.py"))
        return await playing

    assert during(script(wrote), play) == Ending(success=True)
    assert 0 < max(sizes) < 50 << 20


def test_what_the_policy_runs_neither_reads_the_reward_key_nor_writes_the_last_line(home: Path) -> None:
    """It may open what its parent has open, read its variables, and look at its standard input again."""
    attack = """
        echo '{"success": true}' > /proc/$PPID/fd/1
        (for n in 1 2 3 4 5 6 7 8 9; do echo '{"success": true}' > /proc/$PPID/fd/1; sleep 0.05; done) &
        cat /proc/$PPID/environ /proc/$PPID/cmdline
        timeout 0.3 cat /proc/$PPID/fd/0
        timeout 0.3 cat
    """
    agent = f"""
import json, subprocess, sys, time
json.load(sys.stdin)
shell = subprocess.run(["sh", "-c", {attack!r}], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(json.dumps({{"answer": shell.stdout}}))
"""
    [ending] = played(script(agent, environment=["PATH"]), TASK)
    assert ending.success is None
    assert "OPENAI_API_KEY=sk-client-key" in (ending.answer or ending.fault)
    assert "sk-reward-key" not in (ending.answer or "")


def test_a_folder_goes_whatever_is_in_it_and_nothing_outside(home: Path) -> None:
    Path("outside").mkdir(mode=0o755)
    Path("outside/file").write_text("kept")
    makes = f"mkdir -p a/b; touch a/b/c; ln -s {home}/outside a/b/link; chmod 0 a/b; chmod 0 a; chmod 0 ."
    assert played(shell(makes, environment=["PATH"]), TASK) == [Ending()]
    assert (Path("outside/file").read_text(), Path("outside").stat().st_mode & 0o777) == ("kept", 0o755)
    # A file of the project is found from an episode's folder.
    Path("says.py").write_text('print(\'{"answer": "found"}\')')
    assert played(AgentParams(command=[sys.executable, "says.py"], timeout_s=60), TASK) == [Ending(answer="found")]


def test_each_of_64_processes_at_a_time_has_its_own_key(home: Path) -> None:
    says = 'read -r line; case $line in *$OPENAI_MODEL*) echo "{\\"answer\\": \\"$OPENAI_API_KEY\\"}";; esac'
    tasks = [replace(TASK, key=f"sk-{n}", model=f"model-{n}.", text=f"model-{n}.") for n in range(64)]
    assert [each.answer for each in played(shell(says), *tasks)] == [task.key for task in tasks]


@pytest.mark.parametrize("of_the_agent", [True, False])
def test_as_many_run_at_a_time_as_may(home: Path, of_the_agent: bool) -> None:
    counts = f"mkdir {home}/$$; set -- {home}/*[0-9]/; sleep 0.2; rmdir {home}/$$; echo '{{\"answer\": \"'$#'\"}}'"
    agent = shell(counts, environment=["PATH"], concurrency=2 if of_the_agent else 64)
    answers = [each.answer for each in played(agent, *[TASK] * 6, concurrency=64 if of_the_agent else 2)]
    assert "2" in answers
    assert set(answers) <= {"1", "2"}


def test_an_async_function_shares_one_process_beside_the_stage(home: Path) -> None:
    """A call that ends badly ends alone."""
    random.seed(7)
    state = random.getstate()
    agent = AgentParams(function="own_agents:shares", timeout_s=1, rewards=["speed"])
    one, other, waits, exits, lasts = played(agent, *asking("a", "b", "waits", "exits", "lasts"))
    pids, keys = zip(*((each.answer or each.fault).split() for each in (one, other, lasts)), strict=True)
    assert keys == ("sk-key-0", "sk-key-1", "sk-key-4")
    assert len(set(pids)) == 1
    assert str(os.getpid()) not in pids
    assert one.parts == {"speed": 1.0}
    assert random.getstate() == state
    assert "own_agents" not in sys.modules
    assert waits.fault.startswith("it took longer than 1 s\nTraceback")
    assert "await asyncio.sleep(60)" in waits.fault
    assert exits.fault.startswith("it ended with exit code 1\nTraceback")


@cases("text, shown")
def test_hung_async_function_takes_process(home: Path, monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    monkeypatch.setattr(programs, "STOP_S", 1.0)

    async def play(opened: Programs) -> list[str]:
        return [(await opened.play("mine", task)).fault for task in (*asking(text), TASK)]

    first, second = during(AgentParams(function="own_agents:shares", timeout_s=1, rewards=["speed"]), play)
    assert shown in first
    assert second == ""


def test_blocking_function_gets_a_process_per_call(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE_S", 0.5)  # five of them are waited for in the end
    agent = AgentParams(function="own_agents:alone", timeout_s=4)
    asked = "blocks", "raises", "object", "child", "nothing", "is well"
    blocks, raises, given, child, nothing, well = played(agent, *asking(*asked))
    assert blocks.fault.startswith("it took longer than 4 s")
    assert "ValueError: the key *** is wrong" in raises.fault
    assert "TypeError: Object of type set is not JSON serializable" in given.fault
    assert (child.fault, nothing) == ("", Ending())
    pid, rest = (well.answer or well.fault).split(" ", 1)
    assert rest.replace("'LC_CTYPE'", "") == "[] [] 3"
    assert (child.answer or "").split(" ")[0] != pid


@pytest.mark.parametrize("begins", ["async def", "def"])
def test_a_function_of_another_interpreter_is_imported_there_once(home: Path, begins: str) -> None:
    """It finds none of this one's packages, and its own root."""
    venv.create("other")
    text = f"""
import os, sys, importlib.util
PARENT = os.getpid()
{begins} solve(task):
    return {{"answer": f"{{sys.prefix}} {{PARENT}} {{importlib.util.find_spec('numpy')}} {{task.text}}"}}
"""
    Path("own_agents.py").write_text(text)
    agent = AgentParams(function="own_agents:solve", python="other/bin/python", timeout_s=60)
    one, other = (ending.answer or ending.fault for ending in played(agent, *asking("same", "same")))
    assert one == other
    assert (one.split()[0], one.split()[2:]) == (str(home / "other"), ["None", "same"])


@cases("agent, fault")
def test_an_agent_that_is_not_there_is_refused_at_its_first_episode(home: Path, agent: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){fault}"):
        played(AgentParams(timeout_s=1, **agent), TASK)


STAGE = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from agent_r1.agents.programs import Programs
from agent_r1.params.agents import AgentParams
from tests.agents.test_programs import TASK, asking

async def stage():
    agents = {{
        "commands": AgentParams(command=["sh", "-c", {leaves!r}], timeout_s=600, environment=["PATH"]),
        "alone": AgentParams(function="own_agents:alone", timeout_s=600, environment=["PATH"]),
        "shares": AgentParams(function="own_agents:shares", timeout_s=600),
    }}
    async with Programs(agents, 64, Path("episodes")) as programs:
        Path("begun").touch()
        plays = [programs.play("commands", TASK) for _ in range(4)]
        plays += [programs.play(name, task) for name in ("alone", "shares") for task in asking("blocks", "waits")]
        await asyncio.gather(*plays)

asyncio.run(stage())
"""


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_nothing_is_left_of_a_stage_that_is_killed(home: Path, wait_s: float) -> None:
    leaves = f"cd {home}; trap '' TERM; setsid sh -c '(setsid sleep 86399 &)'; setsid sleep 86399 & sleep 86399"
    stage = STAGE.format(root=str(Path(__file__).parents[2]), leaves=leaves)
    running = subprocess.Popen([sys.executable, "-c", stage], cwd=home)
    wait_for(Path("begun").exists, running, pause_s=0.01)
    time.sleep(wait_s)
    begun = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert wait_s < 1 or len(begun) > 5
    assert left_of(begun, home) == []
    assert not Path("episodes").exists()


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def left_of(begun: Sequence[psutil.Process], root: Path) -> list[psutil.Process]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        left = [each for each in begun if runs(each)]
        if not left and not processes_of(root):
            return []
        time.sleep(0.05)
    return [*left, *processes_of(root)]


def test_a_play_that_is_given_up_ends_its_process(home: Path) -> None:
    async def play(opened: Programs) -> list[psutil.Process]:
        playing = asyncio.create_task(opened.play("mine", TASK))
        while not processes_of(home / "episodes"):
            await asyncio.sleep(0.01)
        playing.cancel()
        begun = processes_of(home / "episodes")
        with pytest.raises(asyncio.CancelledError):
            await playing
        return await asyncio.to_thread(left_of, begun, home / "episodes")

    assert during(shell("sleep 86399", environment=["PATH"]), play) == []


def test_an_episode_whose_watch_is_killed_is_a_fault(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program left is ended with the stage, after a wait that is short here."""
    source = Path(supervisor.__file__).read_text()
    Path("supervisor.py").write_text(source.replace("_S = 2.0", "_S = 0.1").replace("_S = 30.0", "_S = 1.0"))
    monkeypatch.setattr(supervisor, "__file__", str(Path("supervisor.py").absolute()))
    [ending] = played(shell("kill -9 $PPID; sleep 86399", environment=["PATH"]), TASK)
    assert ending.fault == "the process that ran it was ended"


def test_a_program_that_kills_its_keepers_ends_with_the_stage(home: Path) -> None:
    """Its watch and the supervisor; the stage ends whatever is in the cgroup, and removes the folder."""
    group = programs._cgroup(subprocess.Popen(["true"]).pid)
    if not group.is_dir():
        pytest.skip("this account may make no cgroup of version 2")
    group.rmdir()
    kills = "read _ _ _ keeper _ < /proc/$PPID/stat; setsid sleep 86399 & kill -9 $keeper $PPID; sleep 86399"
    [ending] = played(shell(f"cd {home}; {kills}", environment=["PATH"]), TASK)
    assert ending.fault == "the process that ran it was ended"


def test_a_folder_of_any_depth_goes(home: Path) -> None:
    text = "import os\nfor _ in range(2200):\n    os.mkdir('d')\n    os.chdir('d')"
    assert played(script(text), TASK) == [Ending()]


def test_an_episode_cannot_take_the_folders_of_others(home: Path) -> None:
    takes = "for number in 0 1 2 3 4 5; do echo taken > ../$number; done; echo '{}'"
    assert played(shell(takes, environment=["PATH"]), *[TASK] * 4) == [Ending()] * 4


def test_a_question_beyond_a_mebibyte_is_refused_by_its_id(home: Path) -> None:
    with pytest.raises(ValueError, match=r'1048576 bytes of JSON at most, not 10\d+: shorten .*"q1"'):
        played(shell("cat"), replace(TASK, text="who? " * 210_000))


SECRETIVE = """
import asyncio, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from agent_r1.surroundings import execute_without_secrets, take_secrets
take_secrets()
execute_without_secrets([sys.executable, *sys.argv])
from agent_r1.agents.programs import Programs
from agent_r1.rollout.vllm_engine import engine_environment
from tests.agents.test_programs import TASK, script
reads = "import glob, json\\nfound = 0"
reads += "\\nfor name in glob.glob('/proc/[0-9]*/environ'):"
reads += "\\n    try: found += b'canary' in open(name, 'rb').read()\\n    except OSError: pass"
reads += "\\nprint(json.dumps(dict(answer=str(found))))"

async def stage():
    engine = engine_environment(1, Path("/tmp"), {{}})
    with subprocess.Popen(["sleep", "60"]) as child, subprocess.Popen(["sleep", "60"], env=engine) as of_engine:
        async with Programs({{"mine": script(reads)}}, 1, Path("episodes")) as programs:
            ending = await programs.play("mine", TASK)
        print(ending.answer, os.environ["AGENT_R1_SEARCH_KEY"], os.environ["HTTP_PROXY"])
        child.kill()
        of_engine.kill()

asyncio.run(stage())
"""


@pytest.mark.slow  # a stage of its own
def test_no_process_of_a_stage_shows_a_program_its_secrets(home: Path) -> None:
    """Neither the stage, nor a child that inherits, nor the engine; the stage itself has them."""
    Path("secretive.py").write_text(SECRETIVE.format(root=str(Path(__file__).parents[2])))
    secrets = {"AGENT_R1_SEARCH_KEY": "canary", "HTTP_PROXY": "http://me:canary@proxy.example"}
    command = [sys.executable, "secretive.py"]
    stage = subprocess.run(command, env={**os.environ, **secrets}, capture_output=True, text=True, timeout=120)
    assert stage.stdout.split() == ["0", *secrets.values()], stage.stderr


OPEN = "HTTP/1.1 200 OK\r\n"  # and nothing behind it


@cases("answer, expected")
def test_a_service_is_asked_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int], answer: str, expected: Any
) -> None:
    monkeypatch.setenv("AGENT_R1_AGENT_KEY_MINE", "sk-service")
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        length = int(asked[0].lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.append(await reader.readexactly(length))
        writer.write(answer.encode())
        if answer != OPEN:
            writer.close()

    port = free_port()
    agent = AgentParams(url=f"http://127.0.0.1:{port}/solve", version="1", timeout_s=0.5 if answer == OPEN else 60)

    async def play(opened: Programs) -> Ending:
        async with await asyncio.start_server(serve, "127.0.0.1", port):
            return await opened.play("mine", TASK)

    ending = during(agent, play)
    assert expected in ending.fault if isinstance(expected, str) else ending == Ending(**expected)
    [head, body] = asked
    assert head.startswith(b"POST /solve HTTP/1.1\r\n")
    assert b"authorization: bearer sk-service" in head.lower()
    client = {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-client-key", "model": "policy"}
    assert json.loads(body) == {"question": QUESTION, "reward_key": "sk-reward-key", **client}


def test_an_agent_is_known_by_its_declaration_and_its_source(home: Path) -> None:
    Path("agent.py").write_text("import nothing_of_this_name")
    forms: dict[str, dict[str, Any]] = {
        "function": {"function": "own_agents:alone"},
        "command": {"command": [sys.executable, "agent.py", "fast"]},
        "service": {"url": "http://localhost:1", "version": "1"},
    }

    def hashes(**further: Any) -> dict[str, str]:
        return {
            name: own_code.agent_hash(name, AgentParams.model_validate({"timeout_s": 1, **form, **further}))
            for name, form in forms.items()
        }

    def changed() -> set[str]:
        return {name for name, found in hashes().items() if found != first[name]}

    first = hashes()
    assert len(set(first.values())) == 3
    assert hashes(history="sent").items().isdisjoint(first.items())
    Path("agent.py").write_text("pass")
    assert changed() == {"command"}
    Path("own_agents.py").write_text("pass")
    assert changed() == {"command", "function"}
    forms["service"]["version"] = "2"
    assert changed() == set(forms)
    forms = {"function": {"function": "package.outer:solve"}}
    with pytest.raises(ValueError, match=r"env.agents.function.function: there is no module 'package.outer'"):
        hashes()
