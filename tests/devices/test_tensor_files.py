"""Files of tensors have the bytes of safetensors' own, and their writer takes little memory and holds nobody up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from agent_r1.devices.sharing import load_tensors, save_tensors
from agent_r1.devices.tensor_files import TYPES, write
from agent_r1.files import sha256

TENSORS = {
    **{f"of {number}": torch.arange(6).reshape(2, 3).to(kind) for number, kind in enumerate(TYPES)},
    "a number": torch.tensor(3.0),
    "nothing": torch.empty(0, 4),
    'é"\\': torch.randn(5, 4).T,
}


def test_a_file_has_the_bytes_of_safetensors_own(tmp_path: Path) -> None:
    digest = write(tmp_path / "file", TENSORS, {"format": "pt"})
    plain = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    assert (tmp_path / "file").read_bytes() == save(plain, {"format": "pt"})
    assert digest == sha256(tmp_path / "file")


def test_shards_are_those_of_pytorch_which_reads_both(tmp_path: Path) -> None:
    """But for the order of what is said about the file, which changes from one writing of PyTorch's to the next."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    hashes = save_tensors(ours, TENSORS)
    plain = {name: tensor.contiguous() for name, tensor in TENSORS.items()}  # as PyTorch's asks
    state_dict_saver.save(
        plain, storage_writer=HuggingFaceStorageWriter(str(theirs), save_distributed=True), no_dist=True
    )
    [file] = theirs.iterdir()
    assert hashes == {f"ours/{file.name}": sha256(ours / file.name)}
    (left, left_data), (right, right_data) = (opened(folder / file.name) for folder in (ours, theirs))
    assert (left, left_data) == (right, right_data)
    assert [*left] == [*right]
    for folder in (ours, theirs):
        found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        load_tensors(folder, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert load_file(folder / file.name).keys() == TENSORS.keys()


def opened(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


PEAK = """
import re, sys
from concurrent.futures import thread
from pathlib import Path
import torch
from agent_r1.devices.sharing import save_tensors

def kib(field):
    return int(re.findall(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[0])

class Elsewhere(torch.Tensor):  # stands for a tensor on a GPU
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor).clone() if function is torch.Tensor.cpu else found

work, run = [], thread._WorkItem.run  # another thread lets go of its work when it comes to it, here never
thread._WorkItem.run = lambda item: (work.append(item.args), run(item))
folder = Path(sys.argv[1])
save_tensors(folder / "first", {"weight": torch.ones(1000)})
tensors = {str(number): torch.ones(10 * 2**20).as_subclass(Elsewhere) for number in range(6)}  # of 40 MiB each
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
save_tensors(folder / "then", tensors)
print((kib("VmHWM") - before) / 1024)
"""


@pytest.mark.slow  # a process that imports torch
def test_a_process_holds_a_copy_of_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Of 6 tensors of 40 MiB, and never the bytes of the file."""
    told = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], stdout=subprocess.PIPE, check=True, timeout=100)
    assert 40 < float(told.stdout) < 2 * 40
