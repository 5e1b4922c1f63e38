"""GPUs are counted without CUDA, and a driver that is too old for torch is refused."""

import pytest

from agent_r1 import gpus
from agent_r1.pretrained import default_device
from tests.cases import cases


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@cases("cuda, told")
def test_old_driver_refused(cuda: list[int], told: str, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "driver_cuda", lambda: tuple(cuda))
    with pytest.raises(ValueError, match=f"the NVIDIA driver counts 2 GPUs, {told}"):
        default_device()
    with pytest.raises(ValueError, match=r"is built for CUDA 13\.0; update the driver"):
        gpus.visible_gpus()


@pytest.mark.parametrize("cuda", [(13, 0), (13, 5), (14, 0)])
def test_driver_of_the_major_will_do(cuda: tuple[int, int], two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "driver_cuda", lambda: cuda)
    assert gpus.visible_gpus() == ["0", "1"]
    assert default_device().type == "cuda"
