"""Agents whose loop is outside: a function in a process beside the stage, a command for each episode, or a service."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from agent_r1 import own_code
from agent_r1.agents import supervisor
from agent_r1.agents.supervisor import FOLDER, GRACE_S, KEPT
from agent_r1.agents.task import Ending, Task
from agent_r1.files import closed_folder, remove_folder
from agent_r1.harmless import harmless_lines
from agent_r1.http.client import BadAnswerError, Client, RefusalError, parsed, read_key
from agent_r1.params.agents import AgentParams
from agent_r1.surroundings import is_secret

KEY = "AGENT_R1_AGENT_KEY_"  # with a service's name in capitals: the bearer token that it is sent
START_S = 600.0  # until a function is imported
STOP_S = 4 * GRACE_S  # until a process that was asked to end has ended
_SHOWN = 2000  # characters of the last words of a program
# Starts a function by any interpreter, which finds `agent_r1.agents`, and no other package of this one's.
_START = """
import runpy, sys, types
package = sys.modules["agent_r1"] = types.ModuleType("agent_r1")
package.__path__ = [sys.argv.pop(1)]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Stated(BaseModel):
    """An agent's word on an episode: in the last line of a command, a service's answer, or a function's result."""

    model_config = ConfigDict(extra="forbid", strict=True)

    answer: str | None = None
    success: bool | None = None
    parts: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default={})


class _Report(BaseModel):
    """How a process ended; see `agent_r1.agents.supervisor.watch`."""

    code: int
    last: str
    words: str


class _LostError(ConnectionError):
    """The process that runs an episode ended without a report, or does not end at all."""


class Programs:
    """All agents of a stage. Every process of theirs ends when it is left, and when the stage is killed."""

    def __init__(self, agents: Mapping[str, AgentParams], concurrency: int, folder: Path) -> None:
        """At most `concurrency` episodes run at a time. `folder` is theirs alone: it is emptied, and goes with them.

        Starts nothing yet. Raises ValueError for a command or variable that is not there.
        """
        self._agents = agents
        self._folder = folder.absolute()
        self._room = asyncio.Semaphore(concurrency)
        self._rooms = {name: asyncio.Semaphore(agent.concurrency) for name, agent in agents.items()}
        self._keys = {name: read_key(KEY, name) for name in agents}
        self._variables = {name: _variables(name, agent) for name, agent in agents.items()}
        self._commands = {name: own_code.command(name, agent) for name, agent in agents.items()}
        self._functions = dict[str, _Function]()
        self._starting = asyncio.Lock()
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises OSError where processes cannot be watched."""
        async with AsyncExitStack() as opening:
            remove_folder(self._folder)
            self._supervisor = await opening.enter_async_context(_supervisor(closed_folder(self._folder)))
            opening.push_async_callback(self._end_functions)
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *fault: Any) -> None:
        await self._open.__aexit__(*fault)

    async def play(self, agent: str, task: Task) -> Ending:
        """Runs one episode to its end. Raises ValueError for a function that cannot be imported."""
        async with self._rooms[agent], self._room:
            try:
                statement = parsed((await self._played(agent, task)).encode() or b"{}", Stated)
                for part in statement.parts:
                    if part not in self._agents[agent].rewards:
                        raise BadAnswerError(f"{part!r} is no part in env.agents.{agent}.rewards; name it there")
            except BadAnswerError as fault:
                return Ending(fault=self._hidden(agent, f"what it stated is no outcome: {fault}", task))
            except (TimeoutError, ConnectionError, RefusalError) as fault:
                return Ending(fault=self._hidden(agent, str(fault), task))
            return Ending(**statement.model_dump())

    async def _played(self, agent: str, task: Task) -> str:
        """The JSON that an agent states at the end. Raises TimeoutError, ConnectionError, and the client's errors."""
        section = self._agents[agent]
        client = {"base_url": task.base_url, "api_key": task.key, "model": task.model}
        question = {"id": task.question_id, "text": task.text, "setup": task.setup, "strata": task.strata}
        request = {"question": question, "reward_key": task.reward_key}
        if section.url:
            return await self._posted(agent, section.url, request | client)
        if section.function:
            return await (await self._function(agent)).call(self._order(asdict(task)), section.timeout_s)
        environment = self._variables[agent] | _client_variables(client)
        order = self._order(request, command=self._commands[agent], environment=environment)
        return await _last_line(await _sent(self._supervisor, order), section.timeout_s)

    async def _posted(self, agent: str, address: str, content: Mapping[str, Any]) -> str:
        """What the service of an agent answers."""
        url = urlsplit(address)
        service = Client(f"{url.scheme}://{url.netloc}", self._agents[agent].timeout_s, self._keys[agent])
        answer = await service.answer("POST", url.path or "/", json.dumps(content), KEPT)
        return answer.require_ok(again=()).body.decode(errors="replace")

    def _order(self, content: Any, **fields: Any) -> dict[str, Any]:
        """An order in a folder that no other episode can foretell. Raises ValueError for too large a question."""
        folder = str(self._folder / token_hex(8))
        text = json.dumps(content)
        if len(text) > KEPT:
            raise ValueError(f"a program is told {KEPT} bytes of JSON at most, not {len(text)}: shorten {text[:60]}...")
        return {"input": text, "folder": folder, "grace_s": GRACE_S, **fields}

    async def _function(self, agent: str) -> _Function:
        """The process of a function, a new one after its end; a ValueError says why there is none."""
        async with self._starting:
            if agent not in self._functions or self._functions[agent].is_over:
                names = (self._agents[agent].function or "").split(":")
                python = self._commands[agent] or [sys.executable]
                module = [str(Path(supervisor.__file__).parents[1]), "agent_r1.agents.functions"]
                command = [*python, "-P", "-c", _START, *module, str(Path.cwd()), *names]
                order = self._order({}, command=command, environment=self._variables[agent]) | {"grace_s": 5 * GRACE_S}
                control, function_end = socket.socketpair()
                with function_end:
                    function = _Function(control, await _sent(self._supervisor, order, function_end))
                self._functions[agent] = function
                if not await function.is_ready():
                    words = (await function.end()).strip().rpartition("\n")[2]
                    why = words or f"it was not imported within {START_S:g} s"
                    why += f"; `python -c 'import {names[0]}'` in the project's root shows where"
                    raise ValueError(self._hidden(agent, f"env.agents.{agent}.function cannot be used: {why}"))
            return self._functions[agent]

    async def _end_functions(self) -> None:
        await asyncio.gather(*(function.end() for function in self._functions.values()))

    def _hidden(self, agent: str, words: str, task: Task | None = None) -> str:
        """Words that show no key of the episode or of the service, and no variable that looks like one."""
        keys = [value for name, value in self._variables[agent].items() if is_secret(name, value) and len(value) > 7]
        keys += [self._keys[agent], *((task.key, task.reward_key) if task else ())]
        for key in filter(None, keys):
            words = words.replace(key, "***")
        return harmless_lines(words)


def _client_variables(client: Mapping[str, str]) -> dict[str, str]:
    """The variables from which the clients of OpenAI and Anthropic take the endpoint of an episode."""
    of_anthropic = {**client, "base_url": client["base_url"].removesuffix("/v1")}  # its clients add the version
    variables = {f"OPENAI_{name.upper()}": value for name, value in client.items()}
    return variables | {f"ANTHROPIC_{name.upper()}": value for name, value in of_anthropic.items()}


class _Function:
    """The process in which a function is called."""

    def __init__(self, control: socket.socket, stream: Stream) -> None:
        """Calls are sent over `control`; `stream` ends the process, and tells how it ended."""
        control.setblocking(False)
        self._control = control
        self._stream = stream
        self.is_over = False
        self._report = asyncio.create_task(_all_of(stream[0]))

    async def is_ready(self) -> bool:
        """Whether it takes calls, once that is known."""
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(START_S):
                return bool(await asyncio.get_running_loop().sock_recv(self._control, 1))
        return False

    async def call(self, order: Mapping[str, Any], seconds: float) -> str:
        """The last line of a call, as `_last_line` has it. A call that cannot be ended alone ends the process."""
        try:
            return await _last_line(await _sent(self._control, order), seconds)
        except _LostError as fault:
            raise _LostError(f"{fault}\n{await self.end()}") from None

    async def end(self) -> str:
        """Ends it; its last words."""
        self.is_over = True
        self._control.close()  # no call comes any more
        with suppress(OSError):
            self._stream[1].write_eof()
        finished, _ = await asyncio.wait({self._report}, timeout=6 * GRACE_S)
        self._stream[1].close()
        return parsed(self._report.result(), _Report).words[-_SHOWN:] if finished and self._report.result() else ""


async def _sent(control: socket.socket, order: Mapping[str, Any], program_end: socket.socket | None = None) -> Stream:
    """Sends an order over `control`, with a socket for its program; the stream of its end, or else _LostError."""
    stage_end, supervisor_end = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=stage_end)
    writer.write(json.dumps(order).encode() + b"\n")
    with supervisor_end:
        while True:
            try:
                socket.send_fds(control, [b"."], [end.fileno() for end in (supervisor_end, program_end) if end])
            except BlockingIOError:  # who takes it is behind
                await asyncio.sleep(0.01)
            except OSError:
                writer.close()
                raise _LostError("the process that was to run it is gone") from None
            else:
                return reader, writer


async def _last_line(stream: Stream, seconds: float) -> str:
    """The last line of an order's program, which is ended after its limit of time, or when this is cancelled.

    Raises TimeoutError after the limit, ConnectionError for another exit code than 0, both with the last words, and
    _LostError.
    """
    reader, writer = stream
    report = asyncio.create_task(_all_of(reader))
    try:
        in_time, _ = await asyncio.wait({report}, timeout=seconds)
        if not in_time:
            with suppress(OSError):
                writer.write_eof()
            await asyncio.wait({report}, timeout=STOP_S)
        late = "" if in_time else f"it took longer than {seconds:g} s"
        if not (report.done() and report.result()):
            raise _LostError(late or "the process that ran it was ended")
    finally:
        report.cancel()
        writer.close()
    result = parsed(report.result(), _Report)
    words = result.words.strip()[-_SHOWN:]
    if late:
        raise TimeoutError(f"{late}\n{words}")
    if result.code:
        raise ConnectionError(f"it ended with {_how(result.code)}\n{words}")
    return result.last


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    with suppress(ConnectionError):
        return await reader.read()
    return b""


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code}"


def _variables(name: str, agent: AgentParams) -> dict[str, str]:
    """The variables of the stage that an agent's process gets; a ValueError names one that is not set."""
    for variable in agent.environment:
        if variable not in os.environ:
            raise ValueError(f"env.agents.{name} hands on {variable}, which is not set in the environment; set it")
    return {variable: os.environ[variable] for variable in agent.environment}


@asynccontextmanager
async def _supervisor(folder: Path) -> AsyncIterator[socket.socket]:
    """Starts the supervisor; the socket over which it takes orders, and with which it ends and removes the folder."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise OSError("agents outside need Linux, with a /proc that lists the children of a process; train on such one")
    stage_end, supervisor_end = socket.socketpair()
    stage_end.setblocking(False)
    command = [sys.executable, "-I", "-S", supervisor.__file__]
    with supervisor_end:
        process = subprocess.Popen(
            command,
            stdin=supervisor_end.fileno(),
            stdout=subprocess.DEVNULL,
            env={FOLDER: str(folder)},
            start_new_session=True,
        )
    group = _cgroup(process.pid)
    try:
        yield stage_end
    finally:
        stage_end.close()
        await asyncio.to_thread(process.wait)
        with suppress(OSError):
            (group / "cgroup.kill").write_text("1")  # a program may have killed the supervisor
        supervisor.remove(folder)
        with suppress(OSError):
            group.rmdir()  # or it stays, empty, where one needs a moment to end


def _cgroup(leader: int) -> Path:
    """A new cgroup (of version 2) of a process and all that it will start; no folder where this user may make none."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        group = Path(f"{root}{own}", f"agent_r1_{token_hex(8)}")
        with suppress(OSError):
            if (group.parent / "cgroup.procs").exists():
                group.mkdir()
                (group / "cgroup.procs").write_text(str(leader))
                break
    return group
