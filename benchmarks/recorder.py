"""Records which lines ran, of those that it is asked about; a copy of it is the sitecustomize.py of every process.

Beside it `asked.json` has file -> lines. It adds `FILE:LINE` to `ran` when a line is first run by a process.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
ASKED = {str(HERE / file): {*lines} for file, lines in json.loads((HERE / "asked.json").read_text()).items()}


def of_call(frame: FrameType, event: str, argument: Any) -> Any:
    return of_line if ASKED.get(frame.f_code.co_filename) else None


def of_line(frame: FrameType, event: str, argument: Any) -> Any:
    file, line = frame.f_code.co_filename, frame.f_lineno
    if event == "line" and line in ASKED[file]:
        ASKED[file].discard(line)
        with (HERE / "ran").open("a") as ran:
            ran.write(f"{Path(file).relative_to(HERE)}:{line}\n")
    return of_line


threading.settrace(of_call)
sys.settrace(of_call)
