"""`prepare.worlds`: the seeds by which a world is drawn."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent_r1.params.sections import Natural, Refusals, Section

SPLITS = ("train", "dev", "test")

Seeds = Annotated[list[Natural], Field(min_length=2, max_length=2)]  # from the first up to, and without, the second


class WorldSeeds(Section):
    """Which seeds a world is drawn by. A split that is left out has no questions."""

    train: Seeds | None = None
    dev: Seeds | None = None
    test: Seeds | None = None

    @property
    def given(self) -> dict[str, list[int]]:
        """The splits that have seeds, with the first of them, and the one after the last."""
        return {split: vars(self)[split] for split in SPLITS if vars(self)[split]}

    def refusals(self) -> Refusals:
        if not self.given:
            yield "a world needs seeds: give it train, dev or test, such as test: [123, 379]"
        for split, (first, stop) in self.given.items():
            if first >= stop:
                yield f"{split} {[first, stop]} holds no seed; the second is the one after the last"
