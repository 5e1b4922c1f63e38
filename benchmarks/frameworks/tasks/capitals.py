"""Tasks of verifiers."""

import verifiers.v1 as vf

__all__ = ["Capitals"]


class Capital(vf.Task):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.name in trace.last_reply)


class Capitals(vf.Taskset):
    def load(self):
        for land, city in {"France": "Paris", "Peru": "Lima"}.items():
            yield Capital(vf.TaskData(name=city, prompt=f"What is the capital of {land}?"))
