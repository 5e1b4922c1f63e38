"""Takes the pictures of docs/ anew: `python docs/pictures.py`, while `make serve` runs and after a training.

Shows the latest finished run of the flow `training` in Prefect, the runs of `repro_runs` side by side in MLflow, and a
run's trajectory viewer on a laptop and on a phone. Needs Chromium or Chrome on the PATH.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from playwright.sync_api import Browser, sync_playwright

from agent_r1 import params

HERE = Path(__file__).parent
LAPTOP, PHONE = (1280, 800), (390, 844)
CURVE = "rollout/success"


def main(prefect: str, mlflow: str, viewer: Path, flow: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        take(browser, f"{prefect}/runs/flow-run/{latest_run(prefect, flow)}", "prefect.png", LAPTOP)
        take(browser, comparison(mlflow, trained()), "mlflow.png", LAPTOP)
        take(browser, viewer.absolute().as_uri(), "viewer.png", LAPTOP)
        take(browser, viewer.absolute().as_uri(), "viewer_phone.png", PHONE)
        browser.close()


def trained() -> list[str]:
    """What the runs of `repro_runs` are called in MLflow."""
    settings = params.load()
    runs = [params.RunId(run) for run in settings.repro_runs]
    return [params.RunId(each.run, settings.run(each).seed).label for each in runs]


def browser_path() -> str:
    """The browser of the machine.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        raise FileNotFoundError("there is no chromium, chromium-browser or google-chrome on the PATH; install one")
    return found[0]


def take(browser: Browser, url: str, name: str, size: tuple[int, int]) -> None:
    """Writes what a window of that size shows once it is at rest."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, device_scale_factor=1)
    page.goto(url, wait_until="load")
    page.wait_for_timeout(6_000)  # both servers draw their charts some time after the last request
    for assistant in page.locator('[aria-label="Close"]:visible').all():
        assistant.click()
    page.screenshot(path=HERE / name)
    page.close()


def latest_run(prefect: str, flow: str) -> str:
    """The id of the flow's latest run that has completed."""
    asked = {
        "flows": {"name": {"any_": [flow]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "sort": "START_TIME_DESC",
        "limit": 1,
    }
    runs = post(f"{prefect}/api/flow_runs/filter", asked)
    if not runs:
        raise ValueError(f"no run of the flow {flow!r} has completed at {prefect}; trigger one first")
    return str(runs[0]["id"])


def comparison(mlflow: str, names: list[str]) -> str:
    """The page that draws a curve for the latest run of each name."""
    [experiment] = post(
        f"{mlflow}/api/2.0/mlflow/experiments/search", {"filter": "name = 'agent_r1'", "max_results": 1}
    )["experiments"]
    number = experiment["experiment_id"]
    runs = [latest_of(mlflow, number, name) for name in names]
    shown = {"runs": runs, "metric": CURVE, "experiments": [number], "plot_metric_keys": [CURVE]}
    as_json = {key: json.dumps(value) for key, value in shown.items()}
    return f"{mlflow}/#/metric?{urlencode({**as_json, 'x_axis': 'step'})}"


def latest_of(mlflow: str, experiment: str, name: str) -> str:
    asked = {
        "experiment_ids": [experiment],
        "filter": f"attributes.run_name = '{name}' and metrics.`{CURVE}` >= 0",
        "order_by": ["attributes.start_time DESC"],
        "max_results": 1,
    }
    runs = post(f"{mlflow}/api/2.0/mlflow/runs/search", asked).get("runs", [])
    if not runs:
        raise ValueError(f"{mlflow} has no training {name}; train it first (`make repro`)")
    return str(runs[0]["info"]["run_id"])


def post(url: str, content: dict[str, Any]) -> Any:
    answer = httpx.post(url, json=content, timeout=30)
    answer.raise_for_status()
    return answer.json()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Takes the pictures of docs/ anew.")
    parser.add_argument("--prefect", default="http://127.0.0.1:4200", metavar="URL")
    parser.add_argument("--mlflow", default="http://127.0.0.1:5000", metavar="URL")
    parser.add_argument("--flow", default="training", help="the flow whose latest run is shown")
    parser.add_argument("--viewer", type=Path, default=Path("outputs/view/ppo.html"), metavar="FILE")
    given = parser.parse_args()
    main(given.prefect, given.mlflow, given.viewer, given.flow)
