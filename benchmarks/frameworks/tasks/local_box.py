"""A box of Harbor's without walls: the commands of one task run on this machine."""

import asyncio
import shutil
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult


class LocalBox(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "local"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        for folder in ("/app", "/logs/agent", "/logs/verifier", "/logs/artifacts"):
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        pass

    async def upload_file(self, source_path, target_path) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target_path)

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(source_path, target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        shell = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            cwd=cwd or "/app",
            env=None if env is None else {"PATH": "/usr/bin:/bin", **env},
            stdout=-1,
            stderr=-1,
        )
        stdout, stderr = await asyncio.wait_for(shell.communicate(), timeout_sec)
        return ExecResult(stdout=stdout.decode(), stderr=stderr.decode(), return_code=shell.returncode)
