"""Registered versions as MLflow loads and serves them. Requests and answers are those of OpenAI's Responses."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from mlflow.pyfunc.model import PythonModelContext, ResponsesAgent
from mlflow.types.responses import ResponsesAgentRequest, ResponsesAgentResponse, to_chat_completions_input

from agent_r1.records import Call

Episode = tuple[list[tuple[Call, str]], str]  # its calls, with what was observed, and the answer
Ask = Callable[[str], Episode]
Opening = Callable[[Path, Path], AbstractContextManager[Ask]]  # files of descriptor and parameters -> the agent


class Answering(ResponsesAgent):
    """A registered version that answers questions, one at a time, in a thread that holds its policy."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._thread = ThreadPoolExecutor(1)

    def load_context(self, context: PythonModelContext) -> None:
        """Opens the policy. It stays open until the process ends."""
        stack = ExitStack()
        files = [Path(context.artifacts[name]) for name in ("descriptor", "settings")]
        self._ask = self._thread.submit(stack.enter_context, self._opening(*files)).result()
        atexit.register(stack.close)

    def predict(self, request: ResponsesAgentRequest) -> ResponsesAgentResponse:  # type: ignore[override]
        """The calls, observations and answer of an episode; ValueError for anything but one question."""
        match to_chat_completions_input(request.input):
            case [{"role": "user", "content": str(question)}] if question.strip():
                calls, answer = self._thread.submit(self._ask, question).result()
            case messages:
                roles = f"was sent {[message['role'] for message in messages[:8]]}"
                raise ValueError(f"this agent answers one question, in one message of role user, and {roles}")
        items = list[dict[str, Any]]()
        for number, (call, observation) in enumerate(calls):
            name = f"call-{number}"
            items.append(self.create_function_call_item(name, name, call.tool, call.arguments))
            items.append(self.create_function_call_output_item(name, observation))
        items.append(self.create_text_output_item(answer, "answer"))
        return ResponsesAgentResponse.model_validate({"output": items})
