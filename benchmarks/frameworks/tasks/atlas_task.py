"""A task of inspect-ai."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

CAPITALS = {"France": "Paris", "Peru": "Lima"}


@tool
def look_up():
    async def execute(land: str) -> str:
        """Looks the capital of a land up.

        Args:
            land: Its name.
        """
        return CAPITALS.get(land, "Unknown.")

    return execute


@task
def atlas() -> Task:
    samples = [Sample(input=f"What is the capital of {land}?", target=city) for land, city in CAPITALS.items()]
    return Task(dataset=samples, solver=[use_tools(look_up()), generate()], scorer=includes())
