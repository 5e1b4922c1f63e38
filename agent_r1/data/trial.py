"""Decodes a Parquet file for trial: `python -m agent_r1.data.trial FILE MIB ROWS`, with a limit of memory.

A process of its own, because the unpacked size of a few bytes shows only while they are decoded, and a library that
runs out of memory ends its process. The lines it prints say how many rows went well.
"""

from __future__ import annotations

import os
import resource
import sys

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # another one keeps a gigabyte in reserve

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

TOO_MUCH = 3  # exit code


def main(path: str, mebibytes: int, rows: int) -> None:
    limit = psutil.Process().memory_info().vms + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    count = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(rows, use_threads=False):
                count += batch.num_rows
                print(count, flush=True)  # noqa: T201
    except MemoryError:
        sys.exit(TOO_MUCH)
    except (pa.ArrowException, OSError):
        return  # the next reader names the fault


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
