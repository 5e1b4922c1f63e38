"""Takes the pictures of docs/ anew: `python docs/pictures.py`, while `make serve` runs and after a training.

Shows how a training is started in Prefect and the latest finished runs of the flows `training` and `promote`, the runs
side by side in MLflow and three of them compared, and a run's trajectory viewer on a laptop and on a phone. Needs
Chromium or Chrome on the PATH.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from playwright.sync_api import Browser, sync_playwright

from agent_r1.tracking.store import VIEW

HERE = Path(__file__).parent
LAPTOP, PHONE = (1280, 800), (390, 844)
PASSWORD = Path(".tracking/prefect/password")


def main(prefect: str, mlflow: str, viewer: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        form = f"{prefect}/deployments/deployment/{deployment(prefect, 'training/training')}/run"
        take(browser, form, "prefect_run.png", LAPTOP)
        for flow, name in (("training", "prefect.png"), ("promote", "prefect_decision.png")):
            page = f"{prefect}/runs/flow-run/{latest_run(prefect, flow)}"
            take(browser, page, name, LAPTOP)
        take(browser, comparison(mlflow, "TABLE"), "mlflow_runs.png", LAPTOP)
        take(browser, comparison(mlflow, "CHART"), "mlflow.png", LAPTOP)
        take(browser, three_compared(mlflow), "mlflow_compare.png", LAPTOP)
        take(browser, viewer.absolute().as_uri(), "viewer.png", LAPTOP)
        take(browser, viewer.absolute().as_uri(), "viewer_phone.png", PHONE)
        browser.close()


def browser_path() -> str:
    """The browser of the machine.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        raise FileNotFoundError("there is no chromium, chromium-browser or google-chrome on the PATH; install one")
    return found[0]


def known() -> dict[str, str]:
    """The headers by which Prefect and MLflow know who asks."""
    told = base64.b64encode(PASSWORD.read_bytes()).decode() if PASSWORD.exists() else ""
    return {"Authorization": f"Basic {told}"} if told else {}


def take(browser: Browser, url: str, name: str, size: tuple[int, int]) -> None:
    """Writes what a window of that size shows once it is at rest."""
    window = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=window, device_scale_factor=1, extra_http_headers=known())
    page.goto(url, wait_until="load")
    page.wait_for_timeout(6_000)  # both servers draw their charts some time after the last request
    for assistant in page.locator('[aria-label="Close"]:visible').all():
        assistant.click()
    page.screenshot(path=HERE / name)
    page.close()


def deployment(prefect: str, name: str) -> str:
    """The id of a deployment."""
    answer = httpx.get(f"{prefect}/api/deployments/name/{name}", headers=known(), timeout=30)
    answer.raise_for_status()
    return str(answer.json()["id"])


def latest_run(prefect: str, flow: str) -> str:
    """The id of the flow's latest run that has completed."""
    asked = {
        "flows": {"name": {"any_": [flow]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "sort": "START_TIME_DESC",
        "limit": 1,
    }
    client = "pictures"
    answer = httpx.get(f"{prefect}/api/csrf-token", params={"client": client}, headers=known(), timeout=30)
    token = {"Prefect-Csrf-Client": client, "Prefect-Csrf-Token": answer.json()["token"]}
    runs = post(f"{prefect}/api/flow_runs/filter", asked, token)
    if not runs:
        raise ValueError(f"no run of the flow {flow!r} has completed at {prefect}; trigger one first")
    return str(runs[0]["id"])


def comparison(mlflow: str, mode: str) -> str:
    """The page that `make ui` prints, as it opens (TABLE) or on its charts (CHART)."""
    shown = {"viewStateShareKey": VIEW, "compareRunsMode": mode}
    return f"{mlflow}/#/experiments/{experiment(mlflow)}/runs?{urlencode(shown)}"


def three_compared(mlflow: str) -> str:
    """What MLflow's button Compare shows of the first training of three variants."""
    own = experiment(mlflow)
    asked = {"experiment_ids": [own], "filter": "tags.kind = 'training'", "order_by": ["start_time"]}
    first: dict[str, str] = {}
    for run in post(f"{mlflow}/api/2.0/mlflow/runs/search", asked)["runs"]:
        first.setdefault(run["info"]["run_name"].split("-")[0], run["info"]["run_id"])
    shown = {"runs": json.dumps(list(first.values())[:3]), "experiments": json.dumps([own])}
    return f"{mlflow}/#/compare-runs?{urlencode(shown)}"


def experiment(mlflow: str) -> str:
    """The id of the project's experiment."""
    [found] = post(f"{mlflow}/api/2.0/mlflow/experiments/search", {"filter": "name = 'agent_r1'", "max_results": 1})[
        "experiments"
    ]
    return str(found["experiment_id"])


def post(url: str, content: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    answer = httpx.post(url, json=content, headers=known() | (headers or {}), timeout=30)
    answer.raise_for_status()
    return answer.json()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Takes the pictures of docs/ anew.")
    parser.add_argument("--prefect", default="http://127.0.0.1:4200", metavar="URL")
    parser.add_argument("--mlflow", default="http://127.0.0.1:5000", metavar="URL")
    parser.add_argument("--viewer", type=Path, default=Path("outputs/view/ppo.html"), metavar="FILE")
    given = parser.parse_args()
    main(given.prefect, given.mlflow, given.viewer)
