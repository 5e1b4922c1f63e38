"""Every command of the project: `python -m flows NAME`, from any folder inside the project."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from types import MappingProxyType

COMMANDS = MappingProxyType(
    {
        "prepare": ("flows.prepare", "writes questions and passages"),
        "index": ("flows.index", "builds the index over the passages"),
        "warm_start": ("flows.warm_start", "makes the policy that trainings start from"),
        "train": ("flows.train", "trains a run of params.yaml, or goes on with it"),
        "register": ("flows.operation.register", "registers the policy that a training finished with"),
        "evaluate": ("flows.evaluate", "puts the test questions to any policy"),
        "report": ("flows.report", "compares the runs that were evaluated"),
        "results": ("flows.results", "prints what the last report says"),
        "pipeline": ("flows.pipeline", "runs the graph as one Prefect flow"),
        "overlay": ("flows.overlay", "switches params.yaml to another scale, and back; or lays that scale out beside"),
        "compare": ("flows.compare", "holds two evaluations against each other"),
        "chat": ("flows.chat", "asks an agent"),
        "serve_agent": ("flows.serve_agent", "serves an agent with its tools, as OpenAI's chat completions"),
        "view": ("flows.view", "makes the page of a training's trajectories"),
        "replay": ("flows.replay", "shows what stored trajectories teach under another configuration"),
        "export": ("flows.operation.export", "writes a policy as a folder for others, with a model card"),
        "promote": ("flows.operation.promote", "makes a challenger the champion, if it is better beyond chance"),
        "lineage": ("flows.operation.lineage", "shows what a model was made of, or which models data led to"),
        "doctor": ("flows.operation.doctor", "checks whether this machine is fit, and says what to do"),
        "serving": ("flows.operation.serving", "brings up Prefect, its worker and MLflow on this machine"),
        "deploy": ("flows.operation.deploy", "puts the deployments on a Prefect server"),
    }
)


def main() -> None:
    """Runs one command as the whole of this process; its libraries are imported inside of the rim."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))  # until the rim is there
    from agent_r1.params.sections import nearest
    from flows.stage import clean_end, prepare_process

    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help"):
        lines = [f"  {command:<11} {does}" for command, (_, does) in COMMANDS.items()]
        sys.stdout.write("\n".join(["python -m flows NAME [--help]", "", *lines]) + "\n")
        return
    with clean_end():
        if name not in COMMANDS:
            raise ValueError(f"there is no command {name!r}{nearest(name, COMMANDS)}")
        prepare_process()
        sys.argv = [f"python -m flows {name}", *arguments]
        import_module(COMMANDS[name][0]).main()


if __name__ == "__main__":
    main()
