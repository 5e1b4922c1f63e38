"""The image and what compose.yaml starts in it are of this project: targets, commands, one password."""

import json
import re
from typing import Any

import pytest
import yaml
from typer.main import get_command

from flows.commands import app
from tests.fixtures import PARAMS

ROOT = PARAMS.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
ON_GPUS = yaml.safe_load((ROOT / "compose.cuda.yaml").read_text())["services"]


def commands() -> list[list[str]]:
    return [
        *(each["command"] for each in SERVICES.values()),
        *map(json.loads, re.findall(r"^CMD (.*)$", DOCKERFILE, re.M)),
    ]


def test_containers_run_commands_that_are_there() -> None:
    own = [command[1] for command in commands() if command[0] == "agent-r1"]
    known = get_command(app).commands  # type: ignore[attr-defined]
    assert own
    assert not {*own} - {*known}


@pytest.mark.parametrize("services", [SERVICES, SERVICES | ON_GPUS])
def test_every_service_is_built_from_a_target_and_is_not_root(services: dict[str, Any]) -> None:
    targets = re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.M)
    for name, service in services.items():
        assert service["build"]["target"] in targets
        assert service["image"].endswith(f":{service['build']['target']}")
        assert SERVICES[name]["user"].startswith("${OWNER:?")
    assert DOCKERFILE.count("\nUSER 1001\n") == len(targets) - 1  # all but the base of both


def test_services_know_each_other_by_name_and_password() -> None:
    server = SERVICES["prefect"]["environment"]["PREFECT_SERVER_API_AUTH_STRING"]
    for name in ("worker", "trainer"):
        env = SERVICES[name]["environment"]
        assert env["PREFECT_API_AUTH_STRING"] == server
        assert {env["PREFECT_API_URL"], env["MLFLOW_TRACKING_URI"]} == {"http://prefect:4200/api", "http://mlflow:5000"}
    allowed = [each for each in SERVICES["mlflow"]["command"] if each.startswith("--allowed-hosts=mlflow:5000")]
    assert len(allowed) == 1
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
