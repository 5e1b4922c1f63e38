"""What an import of many long trajectories takes: `python -m benchmarks.imported [--rows 100000] [--store]`.

It writes rollouts as verl dumps them, or with `--ids` as NeMo Gym does with token ids and logprobs, and imports them in
a process of its own, in a folder that is removed.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.stored import options, show

STEPS = 10
TOKENS = 4000
CHARACTERS = 4  # of a token, about
POOL = 256


def text_row(rng: random.Random) -> dict[str, object]:
    length = TOKENS * CHARACTERS // 2
    words = rng.getrandbits(8 * length).to_bytes(length, "little").hex()
    return {"output": words, "gts": "1", "score": float(rng.random() < 0.5)}


def ids_row(rng: random.Random) -> dict[str, object]:
    ids = rng.choices(range(256), k=TOKENS - 100)
    message = {
        "type": "message",
        "role": "assistant",
        "content": [],
        "prompt_token_ids": rng.choices(range(256), k=100),
        "generation_token_ids": ids,
        "generation_log_probs": [round(-rng.random(), 4) for _ in ids],
    }
    return {"response": {"output": [message]}, "reward": float(rng.random() < 0.5)}


def write(folder: Path, rows: int, *, ids: bool) -> None:
    """Writes files of rows, of which POOL differ in more than the question."""
    rng = random.Random(0)
    pool = [json.dumps(ids_row(rng) if ids else text_row(rng))[1:] for _ in range(POOL)]
    for step in range(1, STEPS + 1):
        with (folder / f"{step}.jsonl").open("w") as file:
            for number in range(rows // STEPS):
                question = f"Question {number % 1000}"
                head = {"responses_create_params": {"input": question}} if ids else {"input": question, "step": step}
                file.write(f"{json.dumps(head)[:-1]}, {rng.choice(pool)}\n")


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--ids", metavar="TOKENIZER", default="")
    chosen = parser.parse_args()
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        (project / "params.yaml").write_text((root / "params.yaml").read_text())
        source = project / "source"
        source.mkdir()
        write(source, chosen.rows, ids=bool(chosen.ids))
        size = sum(file.stat().st_size for file in source.iterdir()) / 1e9
        form = "nemo_gym" if chosen.ids else "verl"
        command = [sys.executable, "-m", "flows", "import", str(source), "--as", "many", "--format", form]
        command += ["--tokenizer", chosen.ids] if chosen.ids else []
        subprocess.run(command, cwd=project, env=os.environ | {"PYTHONPATH": str(root)}, check=True)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        stored = sum(file.stat().st_size for file in (project / "outputs").rglob("*") if file.is_file()) / 1e9
    line = {
        "format": form,
        "trajectories": f"{chosen.rows:,}",
        "tokens": f"{TOKENS:,}",
        "source GB": f"{size:.2f}",
        "stored GB": f"{stored:.2f}",
        "peak GiB": f"{spent.ru_maxrss / 2**20:.2f}",
        "CPU s": f"{spent.ru_utime + spent.ru_stime:.0f}",
    }
    show("imported", [line], store=chosen.store, keys=2)


if __name__ == "__main__":
    main()
