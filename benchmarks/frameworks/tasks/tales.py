"""Tasks of aviary."""

from aviary.core import DummyEnv, TaskDataset


class Tales(TaskDataset):
    """Stories about things."""

    def get_new_env_by_idx(self, idx: int) -> DummyEnv:
        return DummyEnv(task=["a fox", "a pond"][idx])

    def __len__(self) -> int:
        return 2
