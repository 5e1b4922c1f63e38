"""Prefect's command line as this project starts a worker, `python -m flows.prefect_worker worker start`.

It ends with the process that started it, however that ended.
"""

from prefect.cli import app

from flows.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    app()
