"""Serves environments by OpenEnv's own package: openenv_server.py words|tools PORT."""

import sys
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

KIND, PORT = sys.argv[1], int(sys.argv[2])


class Guess(Action):
    message: str


class Said(Observation):
    prompt: str


class Words(Environment):
    """A number is to be guessed, which is the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs) -> Said:
        self._state, self._secret = State(episode_id=str(uuid4())), str(seed)
        return Said(prompt="I think of a number.", reward=None, done=False)

    def step(self, action: Guess, timeout_s=None, **kwargs) -> Said:
        right = action.message == self._secret
        return Said(prompt="no", reward=1.0 if right else -0.5, done=right)

    @property
    def state(self) -> State:
        return self._state


class Tools(MCPEnvironment):
    """Two numbers are to be added."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs) -> Observation:
        self._state = State(episode_id=str(uuid4()))
        return Observation(reward=0.0, done=False, metadata={"prompt": "Add 2 and 3."})

    async def step_async(self, action, timeout_s=None, **kwargs) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            right = action.arguments == {"a": 2, "b": 3}
            return observation.model_copy(update={"reward": float(right), "done": right})
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs) -> Observation:
        return Observation(reward=0.0, done=False)

    @property
    def state(self) -> State:
        return self._state


kinds = {"words": (Words, Guess, Said), "tools": (Tools, CallToolAction, CallToolObservation)}
uvicorn.run(create_app(*kinds[KIND], env_name=KIND, max_concurrent_envs=8), host="127.0.0.1", port=PORT)
