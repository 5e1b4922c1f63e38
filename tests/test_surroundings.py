"""A process in surroundings that others made: a proxy, few files, a user without a home."""

import os
import resource
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1 import surroundings
from agent_r1.http.client import Client
from agent_r1.surroundings import room, settle
from tests.answering import answering
from tests.cases import cases


@pytest.fixture(autouse=True)
def files() -> Iterator[tuple[int, int]]:
    """The limits of open files, which are put back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_own_servers_are_asked_without_a_proxy_and_others_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(lambda _: (200, b"{}")) as url:
        client = Client(url, 5.0, "")
        with pytest.raises(ConnectionError):
            client.require_health()
        settle()
        client.require_health()
        with urllib.request.urlopen(url) as answer:
            assert answer.status == 200
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "example.org,localhost,127.0.0.1,::1"
    with pytest.raises(ConnectionError):
        Client("http://example.com", 5.0, "").require_health()


def test_as_many_files_are_opened_as_the_system_allows_which_is_said_where_it_is_few(
    files: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, files[1]))
    assert room() == 42  # of three files each, beside 128
    settle()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files[1], files[1])
    assert "files open at once" not in caplog.text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    settle()
    assert "may have 1024 files open at once, so 298 episodes run at a time" in caplog.text


@pytest.mark.parametrize("account", [True, False])
def test_a_user_whose_home_cannot_be_written_to_gets_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, account: bool
) -> None:
    """An account may have no entry, as in a container of OpenShift, or one whose home is not there."""
    if not account:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    monkeypatch.setattr(surroundings.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(surroundings, "closed_folder", lambda path: path.mkdir(0o700) or path)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr(os, "access", lambda path, _: tmp_path in Path(path).parents)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("LOGNAME")
    settle()
    own = tmp_path / f"agent_r1-{os.getuid()}"
    assert (os.environ["HOME"], stat.S_IMODE(own.stat().st_mode)) == (str(own), 0o700)
    assert f"the home /nonexistent cannot be written to: {own} is used" in caplog.text
    assert os.environ.get("LOGNAME") == (None if account else "4000000000")


@pytest.mark.parametrize("content", ["flags\t\t: fpu avx fma f16c\n", "Features\t: fp asimd sve\n", None])
def test_kernels_are_not_pinned_on_a_processor_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "cpuinfo"
    if content:
        file.write_text(content)
    monkeypatch.setattr(surroundings, "_CPUINFO", file)
    with pytest.raises(ValueError, match=r"model\.portable: true pins kernels to AVX2, .* lacks; set it to false"):
        surroundings.pin_kernels()
    assert not surroundings.are_pinned()
    assert surroundings.machine().endswith("of an unnamed processor, without AVX2")


@cases("flags, pinned, name")
def test_machine_names_the_instruction_set_of_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, pinned: bool, name: str
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name\t: EPYC\nflags\t\t: fpu {flags}\nmodel name\t: EPYC\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(surroundings, "_CPUINFO", file)
    monkeypatch.setattr(os, "environ", {**os.environ})
    if pinned:
        surroundings.pin_kernels()
    assert surroundings.machine().endswith(f" of EPYC, {name}")


PINNED = """
from agent_r1.surroundings import are_pinned, pin_kernels

pin_kernels()
import numpy, torch, threadpoolctl
from numpy._core._multiarray_umath import __cpu_features__ as sets
from agent_r1.replaced import hide_wide_kernels

hide_wide_kernels()
blas = [pool["architecture"] for pool in threadpoolctl.threadpool_info() if "architecture" in pool]
print(torch.backends.cpu.get_cpu_capability(), *blas, sets["AVX2"], sets["AVX512_SKX"], are_pinned())
print(torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported())
"""


@pytest.mark.skipif(not surroundings.processor_flags() >= {"avx2", "fma"}, reason="of a processor with AVX2")
def test_pinned_kernels_are_those_of_avx2_in_torch_numpy_and_vllm() -> None:
    process = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["AVX2", "Haswell", "True", "False", "True", "False", "False"]
