"""Prefect and MLflow as this project starts them; `python -m flows.apps` is Prefect's command line.

Each ends with the process that started it, however that ended.
"""

from __future__ import annotations

import binascii
import gc
import json
import os
import re
from base64 import b64decode
from secrets import compare_digest

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_r1.params.sections import LOOPBACK
from agent_r1.replaced import (
    begin_mlflows_metrics,
    begin_mlflows_page,
    keep_artifacts_home,
    schedule_automations,
)
from agent_r1.tracking.store import FINAL
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
OLD_PAGE = re.compile(r"/(runs|flows|deployments|blocks|work-(pools|queues)|concurrency-limits|automations|events)/.+")
TOLD = re.compile("/(version|docs|redoc|openapi)")  # what Prefect's server tells of itself outside of its API
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
        datasets/(create|search)|datasets/[^/]+(/records|/tags(/[^/]+)?|/experiment-ids)?|
        scorers/list|get-trace-artifact|server-info|ui-telemetry
    )
    """,
    re.VERBOSE,
)


def prefect() -> ASGIApp:
    """Wraps Prefect's app in a check of the Host header: a page whose name was made to lead here is answered 400.

    The check is around the app and not in it, because Prefect sends requests to itself under a name of its own. Links
    that Prefect's commands print lead to its new page, unless the visitor went back to the old one.
    """
    end_with_parent()
    os.umask(0o077)  # its database holds logs and parameters
    gc.set_threshold(*IMPORTING)  # for good: the first start makes as many objects again for its tables
    from prefect.server.api.server import create_app

    schedule_automations()
    app = create_app()
    password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "")

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["type"] == "http" and TOLD.match(scope["path"])
        refused = _unknown(Headers(scope=scope), password, "Prefect") if closed else None
        await (refused or _new_page(scope) or app)(scope, receive, send)

    return TrustedHostMiddleware(guarded, allowed_hosts=LOOPBACK)


def _new_page(scope: Scope) -> Response | None:
    path = scope.get("path", "")
    if not OLD_PAGE.fullmatch(path) or "prefect_ui_version=v1" in Headers(scope=scope).get("cookie", ""):
        return None
    return RedirectResponse(f"/v2{path}")


def mlflow() -> ASGIApp:
    """Puts MLflow's app behind a password, a list of routes and one place for files, all from the environment.

    MLflow's own basic-auth brings a database of users and rights, and leaves the assistant, which runs shells, to all.
    """
    end_with_parent()
    gc.set_threshold(*IMPORTING)
    password = os.environ.pop(PASSWORD, "")
    from mlflow.server.fastapi_app import app

    keep_artifacts_home(os.environ[HOME])
    begin_mlflows_metrics(FINAL)
    begin_mlflows_page(OPENING % (json.dumps(os.environ[FIRST]), json.dumps(SEEN)))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        await (_refusal(scope["path"], Headers(scope=scope), password) or app)(scope, receive, send)

    return TrustedHostMiddleware(guarded, allowed_hosts=LOOPBACK)


def _refusal(path: str, headers: Headers, password: str) -> Response | None:
    if path in OPEN:
        return None
    if refused := _unknown(headers, password, "MLflow"):
        return refused
    if headers.get("origin") not in (None, f"http://{headers['host']}"):
        return PlainTextResponse("pages of other origins get no answer", 403)
    if path == GATEWAY:
        return JSONResponse({"endpoints": []})
    return None if ROUTES.fullmatch(path) else PlainTextResponse(f"this server does not offer {path}", 403)


def _unknown(headers: Headers, password: str, server: str) -> Response | None:
    """The refusal of a request without the password, if there is one."""
    if not password or compare_digest(_sent(headers.get("authorization", "")), password.encode()):
        return None
    challenge = {
        "WWW-Authenticate": f'Basic realm="{server} of agent_r1: any user, and the password of agent-r1 serving"'
    }
    return PlainTextResponse(f"{server} asks for the password; `agent-r1 serving` says it", 401, challenge)


def _sent(authorization: str) -> bytes:
    """The password of `user:password`, as browsers and MLflow's clients send it, or a token."""
    kind, _, sent = authorization.partition(" ")
    try:
        return b64decode(sent).rpartition(b":")[2] if kind.lower() == "basic" else sent.encode()
    except binascii.Error:
        return b""


if __name__ == "__main__":
    end_with_parent()
    from prefect.cli import app

    app()
