"""Prefect and MLflow as this project starts them; `python -m flows.apps` is Prefect's command line.

Each ends with the process that started it, however that ended.
"""

from __future__ import annotations

import asyncio
import binascii
import gc
import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Coroutine
from pathlib import Path
from secrets import compare_digest
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_r1.params.sections import LOOPBACK
from flows.processes import IMPORTING, end_with_parent

PASSWORD = "MLFLOW_TRACKING_PASSWORD"  # the variable in which MLflow's clients find it, and this server its own
HOME = "_MLFLOW_SERVER_ARTIFACT_ROOT"  # where MLflow's server finds the folder, or address, of artifacts
FIRST = "AGENT_R1_FIRST_VIEW"  # the fragment of the address of the view that `/` opens
SEEN = {  # entries of a browser's local storage, as a visitor of MLflow's pages has them who came before
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,  # else the assistant, which is refused here, opens
    "mlflow.detectIssues.guidanceShown_v1": True,  # so does a tour over the traces
    "_mlflow_model_registry_promo_modal_dismissed_v1": True,  # and another over the registry
    "mlflow.telemetry.info.alert.dismissed_v1": True,  # nothing is told here
    "mlflow.workflowType_v1": "machine_learning",  # lists runs, models and traces at the side
}
OPENING = """<script>
location.hash ||= %s;
for (const [name, value] of Object.entries(%s)) localStorage[name] ??= JSON.stringify(value);
</script>"""
GATEWAY = "/ajax-api/2.0/mlflow/gateway-proxy"  # which MLflow's first page asks, and shows a refusal in red
OPEN = ("/health", "/version")  # to everybody on this machine
ROUTES = re.compile(
    r"""
    /|/health|/version|/static-files/.+|/graphql|/get-artifact|/model-versions/get-artifact|/v1/traces|
    /(ajax-)?api/[23]\.0/mlflow/(
        experiments/(create|delete|(set|delete)-experiment-tag|get|get-by-name|restore|search|search-datasets|update)|
        runs/(create|delete|(set|delete)-tag|get|log-(batch|inputs|metric|model|parameter)|outputs|restore|search|update)|
        artifacts/list|metrics/get-history|metrics/get-history-bulk(-interval)?|
        registered-models/(alias|create|delete|(set|delete)-tag|get|get-latest-versions|rename|search|update)|
        model-versions/(create|delete|(set|delete)-tag|get|get-download-uri|search|transition-stage|update)|
        logged-models(/search|/[^/]+(/params|/tags(/[^/]+)?|/artifacts/(directories|files))?)?|
        traces(/(batchGet|batchGetInfos|calculate-filter-correlation|delete-traces|get|link-(prompts|to-run)|metrics|search))?|
        traces/[^/]+(/info|/tags|/assessments(/[^/]+)?)?|
        datasets/search|scorers/list|get-trace-artifact|server-info|ui-telemetry
    )
    """,
    re.VERBOSE,
)


_scheduled = set[asyncio.Task[None]]()  # the event loop itself keeps no task alive


def prefect() -> ASGIApp:
    """Wraps Prefect's app in a check of the Host header: a page whose name was made to lead here is answered 400.

    The check is around the app and not in it, because Prefect sends requests to itself under a name of its own.
    """
    end_with_parent()
    os.umask(0o077)  # its database holds logs and parameters
    gc.set_threshold(*IMPORTING)  # for good: the first start makes as many objects again for its tables
    from prefect.server.api.server import create_app
    from prefect.server.events.models import automations

    # Prefect 3.7 stops its event loop here until a lock is free that the same loop may hold, and answers nobody any
    # more: issue 23055. 3.8.6 does not, but needs a fastapi that vLLM refuses.
    automations.run_coro_as_sync = _schedule  # type: ignore[attr-defined, assignment]
    return TrustedHostMiddleware(create_app(), allowed_hosts=LOOPBACK)


def _schedule(update: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(update)
    _scheduled.add(task)
    task.add_done_callback(_scheduled.discard)


def mlflow() -> ASGIApp:
    """Puts MLflow's app behind a password, a list of routes and one place for files, all from the environment.

    MLflow's own basic-auth brings a database of users and rights, and leaves the assistant, which runs shells, to all.
    """
    end_with_parent()
    gc.set_threshold(*IMPORTING)
    password = os.environ.pop(PASSWORD, "")
    from mlflow.server.fastapi_app import app

    keep_home(os.environ[HOME])
    greet(os.environ[FIRST])

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        await (_refusal(scope["path"], Headers(scope=scope), password) or app)(scope, receive, send)

    return TrustedHostMiddleware(guarded, allowed_hosts=LOOPBACK)


def _refusal(path: str, headers: Headers, password: str) -> Response | None:
    if path in OPEN:
        return None
    if password and not compare_digest(_sent(headers.get("authorization", "")), password.encode()):
        asked = {"WWW-Authenticate": 'Basic realm="MLflow of agent_r1: any user, and the password of make serve"'}
        return PlainTextResponse("MLflow asks for the password; `make serve` and `make ui` say it", 401, asked)
    if headers.get("origin") not in (None, f"http://{headers['host']}"):
        return PlainTextResponse("pages of other origins get no answer", 403)
    if path == GATEWAY:
        return JSONResponse({"endpoints": []})
    return None if ROUTES.fullmatch(path) else PlainTextResponse(f"this server does not offer {path}", 403)


def _sent(authorization: str) -> bytes:
    """The password of `user:password`, as browsers and MLflow's clients send it, or a token."""
    kind, _, sent = authorization.partition(" ")
    try:
        return b64decode(sent).rpartition(b":")[2] if kind.lower() == "basic" else sent.encode()
    except binascii.Error:
        return b""


def greet(first: str) -> None:
    """Has MLflow's page open this view where its address names none, as for a visitor who came before."""
    from mlflow.server import app as pages

    page = Path(str(pages.static_folder), "index.html").read_text()
    opening = OPENING % (json.dumps(first), json.dumps(SEEN))
    pages.view_functions["serve"] = lambda: page.replace("<head>", f"<head>{opening}", 1)


def keep_home(home: str) -> None:
    """Has MLflow refuse, with 403, to read, write or note artifacts outside of this folder, or address."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
    from mlflow.server import handlers
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry as registry
    from mlflow.utils.file_utils import local_file_uri_to_path

    checked, chosen = handlers._validate_artifact_uri_scheme, registry.get_artifact_repository
    path_of: Callable[[str], str] = local_file_uri_to_path
    folder = Path(path_of(home)).resolve()

    def own(uri: str) -> str:
        local = Path(path_of(uri)).resolve() if urlsplit(uri).scheme in ("", "file") else None
        if not (local.is_relative_to(folder) if local else f"{uri}/".startswith(f"{home}/")):
            raise MlflowException(f"artifacts of this server are in {home}, and {uri} is not", PERMISSION_DENIED)
        return uri

    # MLflow itself holds a source that is no address against its run or model.
    handlers._validate_artifact_uri_scheme = lambda uri, field_name: checked(
        uri if field_name == "source" and "://" not in uri else own(uri), field_name
    )
    registry.get_artifact_repository = lambda uri, *given: chosen(own(uri), *given)  # type: ignore[method-assign]


if __name__ == "__main__":
    end_with_parent()
    from prefect.cli import app

    app()
