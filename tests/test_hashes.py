"""Hashes see names and bytes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from agent_r1.hashes import model_hash, sha256


def test_a_file_by_the_standard_example(tmp_path: Path) -> None:
    # FIPS 180-4's example "abc".
    (tmp_path / "file").write_text("abc")
    assert sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def test_a_folder_is_its_names_and_bytes(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"a": "x", "below/b": "y"})
    same = folder(tmp_path / "same", {"below/b": "y", "a": "x"})
    others = [{"a": "x", "below/b": "z"}, {"a": "x", "b": "y"}, {"a": "x"}, {"a": "y", "below/b": "x"}]
    assert sha256(one) == sha256(same)
    hashes = {sha256(folder(tmp_path / str(i), files)) for i, files in enumerate(others)}
    assert len(hashes | {sha256(one)}) == 5


def test_a_model_is_its_folder_or_the_commit_of_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own cache, and no network."""
    local = folder(tmp_path / "local", {"config.json": "{}"})
    assert model_hash(str(local)) == sha256(local)
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = {"refs/main": commit, f"snapshots/{commit}/config.json": "{}"}
    folder(tmp_path / "hub" / "models--own--encoder", cached)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_hash("own/encoder") == commit
    for missing in ("own/reader", "models/own/encoder"):
        with pytest.raises(OSError, match=rf"'{missing}' is no folder, and no model from the hub: .*; correct it"):
            model_hash(missing)


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sha256(tmp_path / "missing")
