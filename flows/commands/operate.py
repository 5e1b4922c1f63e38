"""Commands that operate trained policies, and servers: Prefect and MLflow, an agent, an index, an engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from agent_r1 import params
from agent_r1.params.places import RunId
from flows.commands.options import Label, OfPolicy, Temperature, Word, app
from flows.processes import HOST
from flows.stage import report_to_own_server

PANEL = "Operate"
SERVERS = "Serve"
Host = Annotated[str, Option(help="Another than this machine's own needs AGENT_R1_ENDPOINT_KEY.")]

logger = logging.getLogger(__name__)


@app.command(rich_help_panel=PANEL)
def promote(
    challenger: Annotated[
        str, Argument(metavar="REFERENCE", help="models:/agent_r1/3, or a training such as ppo-seed3.")
    ],
    first: Annotated[bool, Option("--first", help="Makes it the first champion, compared with nothing.")] = False,
    anyway: Annotated[bool, Option("--anyway", help="Also if the world cut episodes short.")] = False,
    against: Annotated[
        str, Option(metavar="IMPORTED", help="Decides about imported/NAME against this one; nothing is registered.")
    ] = "",
) -> None:
    """Makes a challenger the champion, if it is better.

    Better beyond chance: the lower bound of the paired difference is above `promote.margin`.
    """
    from flows.operation.promote import promote_here

    if against:
        from rich.markdown import Markdown

        from agent_r1.evaluation.verdicts import decision_table
        from flows.imported import decide_imported
        from flows.terminal import show

        show(Markdown(decision_table(decide_imported(challenger, against, anyway=anyway))))
        return
    promote_here(challenger, first=first, anyway=anyway)


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def keep(run: Label) -> None:
    """Accepts a finished training under changed code.

    Neither `train` nor DVC trains it anew then. The record has both hashes, of the code that trained it and of today's.
    """
    from flows.operation.attempts import keep as accept

    accept(RunId.meant(run))


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def restore(run: Label) -> None:
    """Brings back a training that was moved aside.

    The last one of a run, or that of a name in outputs/aside. The one in its place goes aside. Its
    entries of dvc.lock, and the scores that DVC keeps, are back too.
    """
    from flows.operation.attempts import restore as bring_back

    bring_back(run)


@app.command(cls=OfPolicy, rich_help_panel=PANEL)
def export(
    policy: Word,
    to: Annotated[Path, Option(metavar="FOLDER", help="That is not there yet.")],
    license_name: Annotated[
        str, Option("--license", metavar="NAME", help="Of the weights, as Hugging Face calls it: apache-2.0, other.")
    ],
    push: Annotated[
        str, Option(metavar="ORG/NAME", help="On the Hub, which takes it with HF_TOKEN; a new one is private.")
    ] = "",
) -> None:
    """Writes a policy as a folder with a model card."""
    from flows.operation import export as exports
    from flows.policies import policy_of

    if push:
        exports.require_pushable(push)
    settings = params.load()
    exported = policy_of(settings, policy)
    exports.export(exported.as_trained(settings), exported, to, license_name)
    if push:
        exports.push(to, push)


@app.command(rich_help_panel=PANEL)
def doctor(
    checks: Annotated[
        list[str] | None, Argument(metavar="CHECK", help="versions, room, ...; all without one. Or: model PATH.")
    ] = None,
    engine: Annotated[bool, Option("--engine", help="The engine's check alone, with all that it says.")] = False,
) -> None:
    """Checks whether this machine, or `model PATH`, is fit."""
    from flows.operation.doctor import doctor as examined
    from flows.operation.doctor import doctor_of_model

    match checks:
        case ["model", *path] if len(path) < 2:
            doctor_of_model(*path)
        case _:
            examined(checks or [], engine=engine)


@app.command(rich_help_panel=PANEL)
def fit(
    model: Word,
    gpu: Annotated[int, Option(metavar="GIB", min=1, max=4096, help="Memory of a GPU.")],
    gpus: Annotated[int, Option(min=1, max=4096, help="That share the learner.")] = 1,
) -> None:
    """Estimates which overlays fit a model and a GPU."""
    from flows.operation.fit import show_fits

    show_fits(model, gpu, gpus)


@app.command(rich_help_panel=PANEL)
def deploy(
    restarted: Annotated[
        bool, Option("--restarted", help="The server was just started and has no worker yet.")
    ] = False,
) -> None:
    """Puts the deployments on a Prefect server.

    It is that of PREFECT_API_URL, and gets the work pool too.
    """
    from flows.operation.deploy import deploy as put

    put(restarted=restarted)


@app.command(rich_help_panel=PANEL)
def worker(
    pool: Annotated[str, Option(metavar="NAME", help="Of the Prefect server; made where it is not there.")],
    limit: Annotated[int, Option(min=1, help="Stages at a time: as many as this machine has GPUs for them.")] = 1,
) -> None:
    """Makes stages for other clones.

    `agent-r1 pipeline --pool` sends them. The clone needs the commit, the PREFECT_API_URL, the MLFLOW_TRACKING_URI and
    the remote of DVC that the others have.
    """
    report_to_own_server()
    from flows.operation.deploy import work

    work(pool, limit)


@app.command(rich_help_panel=PANEL)
def containers(
    pool: Annotated[str, Option(metavar="NAME", help="Of the Prefect server; made where it is not there.")],
    image: Annotated[str, Option(help="Of this commit, by the Dockerfile, as the pool's machines find it.")],
    kind: Annotated[Literal["docker", "kubernetes"], Option("--type", help="Of the pool.")] = "docker",
    template: Annotated[
        Path | None,
        Option(metavar="FILE", help="What `prefect work-pool get-default-base-job-template` writes, edited."),
    ] = None,
) -> None:
    """Has a pool make stages in containers.

    `agent-r1 pipeline --pool` sends them, and a worker of Prefect's own starts a container for each, of which runs
    choose nothing. The image's DVC has the remote of the others.
    """
    report_to_own_server()
    from flows.operation.deploy import offer_containers

    offer_containers(pool, kind, image, template)


@app.command(rich_help_panel=SERVERS)
def serving(
    prefect_port: Annotated[int, Option(help="Of the Prefect server, without PREFECT_API_URL.")] = 4200,
    mlflow_port: Annotated[int, Option()] = 5000,
    only_mlflow: Annotated[bool, Option("--only-mlflow", help="The MLflow UI alone.")] = False,
    auth: Annotated[Literal["on", "off"], Option(help="Whether Prefect and MLflow ask for a password.")] = "on",
) -> None:
    """Brings up Prefect, its worker and MLflow here."""
    from flows.operation.serving import serve, show_mlflow

    if only_mlflow:
        show_mlflow(mlflow_port, with_password=auth == "on")
    else:
        serve(prefect_port, mlflow_port, with_password=auth == "on")


@app.command("serve-agent", cls=OfPolicy, rich_help_panel=SERVERS)
def serve_agent(
    policy: Word = "",
    temperature: Temperature = 0.0,
    host: Host = HOST,
    port: int = 8710,
) -> None:
    """Serves an agent with its tools, for OpenAI's clients.

    They find chat completions, Responses and messages at http://HOST:PORT/v1. Without POLICY the warm start answers.
    AGENT_R1_ENDPOINT_KEY holds the key that clients send.
    """
    from agent_r1.http.endpoint import ENDPOINT_KEY
    from agent_r1.http.guard import open_to_all
    from agent_r1.serving.served import serve
    from flows.operation.answering import agent_of
    from flows.policies import policy_of

    settings = params.load()
    acting_policy = policy_of(settings, policy)
    program = acting_policy.as_trained(settings).env.agent
    if program is not None:
        refusal = f"env.agent is {program!r}, whose own program asks the policy"
        raise ValueError(f"{refusal}; serve it with `agent-r1 serve-policy`, or set env.agent: null")
    if warning := open_to_all(ENDPOINT_KEY, host, "ask it, and have it use its tools as you"):
        logger.warning(warning)
    with agent_of(acting_policy, settings, temperature) as agent:
        serve(agent, acting_policy.name, host=host, port=port)


@app.command("serve-policy", cls=OfPolicy, rich_help_panel=SERVERS)
def serve_policy(
    policy: Word = "",
    temperature: Temperature = 0.0,
    host: Host = HOST,
    port: int = 8711,
    agent: Annotated[
        str | None, Option(metavar="NAME", help="Under env.agents; without it, the env.agent it was trained with.")
    ] = None,
) -> None:
    """Serves a policy to an agent that has a loop of its own.

    Its client finds chat completions at http://HOST:PORT/v1, read and written as in training. The model is `policy`,
    and AGENT_R1_ENDPOINT_KEY holds the key that clients send.
    """
    from agent_r1.http.endpoint import ENDPOINT_KEY
    from agent_r1.http.guard import open_to_all
    from agent_r1.serving.agent import open_policy
    from agent_r1.serving.policy_server import declared_as, serve
    from flows.policies import policy_of

    settings = params.load()
    acting_policy = policy_of(settings, policy)
    trained_settings = acting_policy.as_trained(settings)
    declaration = declared_as(agent, trained_settings.env)
    if warning := open_to_all(ENDPOINT_KEY, host, "ask it"):
        logger.warning(warning)
    with open_policy(trained_settings, acting_policy.weights(settings), temperature) as (engine, chat):
        serve(engine, chat, trained_settings.env, declaration, host=host, port=port)


@app.command("serve-search", rich_help_panel=SERVERS)
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
    from agent_r1.serving.search_server import serve

    serve(index, host, port, name or [])
