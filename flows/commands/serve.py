"""Servers: Prefect and MLflow, an agent, an index, an engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Option

from agent_r1 import params
from flows.commands.options import Model, RunName, SeedOption, Sweep, Temperature, acting, app, opened
from flows.processes import HOST

PANEL = "Serve"

logger = logging.getLogger(__name__)


@app.command(rich_help_panel=PANEL)
def serving(
    prefect_port: Annotated[int, Option(help="Of the Prefect server, without PREFECT_API_URL.")] = 4200,
    mlflow_port: Annotated[int, Option()] = 5000,
    only_mlflow: Annotated[bool, Option("--only-mlflow", help="The MLflow UI alone.")] = False,
    auth: Annotated[Literal["on", "off"], Option(help="Whether Prefect and MLflow ask for a password.")] = "on",
) -> None:
    """Brings up Prefect, its worker and MLflow on this machine."""
    from flows.operation.serving import serve, show_mlflow

    if only_mlflow:
        show_mlflow(mlflow_port, with_password=auth == "on")
    else:
        serve(prefect_port, mlflow_port, with_password=auth == "on")


@app.command("serve_agent", rich_help_panel=PANEL)
def serve_agent(
    run: RunName = None,
    seed: SeedOption = None,
    sweep: Sweep = None,
    model: Model = None,
    temperature: Temperature = 0.0,
    host: Annotated[str, Option(help="Another than this machine's own needs AGENT_R1_ENDPOINT_KEY.")] = HOST,
    port: int = 8710,
    lenient: Annotated[bool, Option("--lenient", help="Puts clients' system messages before the question.")] = False,
) -> None:
    """Serves an agent with its tools, for OpenAI's clients.

    They find chat completions at http://HOST:PORT/v1. Without --run and --model the warm start answers.
    AGENT_R1_ENDPOINT_KEY holds the key that clients send.
    """
    from agent_r1.http.endpoint import ENDPOINT_KEY
    from agent_r1.http.guard import open_to_all
    from agent_r1.inspection.served import serve
    from flows.policies import policy_of

    settings = params.load()
    policy = policy_of(settings, acting(run, seed, sweep, model))
    if warning := open_to_all(ENDPOINT_KEY, host, "ask it, and have it use its tools as you"):
        logger.warning(warning)
    with opened(settings, policy, temperature) as agent:
        serve(agent, policy.name, host=host, port=port, temperature=temperature, lenient=lenient)


@app.command("serve_search", rich_help_panel=PANEL)
def serve_search(
    index: Annotated[Path, Option(help="The index's folder.")] = Path("data/index"),
    host: Annotated[
        str, Option(help="Another than this machine's own lets others search; it asks nobody for a key.")
    ] = HOST,
    port: int = 8700,
    name: Annotated[
        list[str] | None, Option(help="A further name that clients ask for, such as a proxy's; may be given again.")
    ] = None,
) -> None:
    """Serves an index to the searches of other machines."""
    from agent_r1.search.server import serve

    serve(index, host, port, name or [])


@app.command(
    "serve_engine", rich_help_panel=PANEL, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def serve_engine(
    context: Context,
    model: Annotated[str, Argument(help="A Hugging Face folder or hub id; trainings replace its weights.")],
    host: Annotated[str, Option(help="Another than this machine's own needs AGENT_R1_ENGINE_KEY.")] = HOST,
    port: int = 8001,
) -> None:
    """Serves a vLLM engine to trainings.

    Further options are those of vLLM's engine, `--ssl-certfile` and `--ssl-keyfile`.
    """
    from agent_r1.rollout.vllm_engine import serve

    serve(params.load(), model, host, port, context.args)
