"""What an index finds, and what it costs: `python -m benchmarks.search --prepared data/prepared --kind bm25`.

Builds the index of params.yaml over the passages of a prepared data set, in a process of its own, and asks it the
questions of some splits. Questions without gold passages are left out. Prints recall at 2, 5 and 10, milliseconds per
query, the index's size on disk, seconds to build it, and the largest resident memory of the build and of the search; of
times also the processor's, which another process on the machine does not lengthen. `--store` keeps the recall.

`--fill 400000` fills the passages up to so many with sentences of their own, drawn, and has 640 episodes search at the
same time, on the loop and beside it as tools do: CPU milliseconds a query, seconds of the loop's thread, and the
longest time in which the loop served nobody. `--store` keeps these instead.
"""

from __future__ import annotations

import asyncio
import random
import re
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing import get_context
from pathlib import Path

from agent_r1.params import load
from agent_r1.params.stages import SearchParams
from agent_r1.records import Passage, Question
from agent_r1.search.index import Cached, build, describe, open_index
from agent_r1.search.together import Together
from agent_r1.tables import read_rows, write_rows
from benchmarks.stored import Row, options, show

PARAMS = Path(__file__).parents[1] / "params.yaml"
DEPTHS = (2, 5, 10)
EPISODES = 640
SEARCHES = 1408  # 2.2 an episode
TOP_K = 5
Ask = Callable[[str], Awaitable[object]]


def main(
    prepared: Path,
    index: Path,
    splits: Sequence[str],
    limit: int,
    fill: int,
    rebuild: bool,
    store: bool,
    params: SearchParams,
) -> None:
    """Prints a line per figure, and the table of recall."""
    questions = [row for row in read_rows(prepared / "questions.parquet", Question) if row.split in splits]
    questions = [question for question in questions if question.gold_titles][: limit or None]
    if not questions:
        raise SystemExit(
            f"{prepared} holds no questions of {', '.join(splits)} with gold passages; name other --splits, or give a "
            "data set of prepare.files a file for one of them and run `dvc repro prepare`"
        )
    passages = prepared / "passages.parquet"
    if fill:
        passages = filled(passages, fill)
    if rebuild or not index.is_dir():
        with get_context("spawn").Pool(1) as pool:
            print(pool.apply(timed_build, (params, passages, index)))
    search = open_index(params.model_copy(update={"cache_entries": 0}), passages, index)
    search.search([questions[0].text], max(DEPTHS))  # the first search loads what later ones share
    if fill:
        show("search_loop", in_one_iteration(search, questions, fill), store=store, keys=2)
        return
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = search.search([question.text for question in questions], max(DEPTHS))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    megabytes = sum(file.stat().st_size for file in index.rglob("*") if file.is_file()) / 1e6
    print(f"{params.kind}: {describe(index).size} passages, {megabytes:.1f} MB on disk")
    print(
        f"{len(questions)} queries: {1e3 * wall_s / len(questions):.2f} ms each, {1e3 * cpu_s / len(questions):.2f} CPU"
    )
    print(f"searching: {peak_mb():.0f} MB resident at most")
    asked: Row = {
        "data set": ", ".join(dict.fromkeys(question.dataset for question in questions)),
        "kind": in_words(params),
        "questions": f"{len(questions):,}",
        "passages": f"{describe(index).size:,}",
    }
    shares = {f"R@{k}": f"{recall(questions, found, k):.3f}".lstrip("0") for k in DEPTHS}
    show("search", [{**asked, **shares}], store=store, keys=2)


def filled(source: Path, count: int) -> Path:
    """A file beside the source with its passages, and passages of two to five of their sentences, up to the count."""
    rows = [*read_rows(source, Passage)]
    sentences = [sentence for row in rows for sentence in re.split(r"(?<=[.!?]) ", row.text)]
    draws = random.Random(7)
    while len(rows) < count:
        text = " ".join(draws.choices(sentences, k=draws.randint(2, 5)))
        rows.append(Passage(passage_id=str(len(rows)), title=draws.choice(rows).title, text=text))
    path = source.with_name(f"passages-{count}.parquet")
    write_rows(path, rows[:count], Passage)
    return path


def in_one_iteration(search: Cached, questions: Sequence[Question], size: int) -> list[Row]:
    """What the searches of an iteration cost, on the loop and beside it."""
    texts = [questions[i % len(questions)].text for i in range(SEARCHES)]
    together = Together(search)

    async def on_the_loop(query: str) -> object:
        return search.search([query], TOP_K)

    async def beside(query: str) -> object:
        return await together.search(query, TOP_K)

    ways: dict[str, Ask] = {"one by one, on the loop": on_the_loop, "together, in a thread": beside}
    asyncio.run(_episodes(texts, on_the_loop))  # reads the columns from the disk
    return [
        {"passages": f"{size:,}", "searched": name, "queries": f"{SEARCHES:,}", **asyncio.run(_episodes(texts, ask))}
        for name, ask in ways.items()
    ]


async def _episodes(texts: Sequence[str], ask: Ask) -> Row:
    """The cells of one way to ask; each episode's searches follow each other."""
    holds = [0.0]

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            holds.append(time.perf_counter() - before)
            await asyncio.sleep(0.002)

    async def episode(queries: Sequence[str]) -> None:
        for query in queries:
            await ask(query)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    wall_s, cpu_s, loop_s = time.perf_counter(), time.process_time(), time.thread_time()
    await asyncio.gather(*(episode(texts[start::EPISODES]) for start in range(EPISODES)))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    loop_s = time.thread_time() - loop_s
    watcher.cancel()
    return {
        "CPU of a query": f"{1e3 * cpu_s / len(texts):.2f} ms",
        "all": f"{wall_s:.2f} s",
        "CPU of the loop": f"{loop_s:.2f} s",
        "longest hold": f"{1e3 * max(holds):.0f} ms",
    }


def in_words(params: SearchParams) -> str:
    """The kind of index, and of a dense one how it is searched."""
    dense = params.dense
    looked_at = f", {dense.nprobe} of {dense.nlist} clusters" if dense.faiss == "ivf" else ""
    return f"dense, {dense.faiss}{looked_at}" if params.kind == "dense" else params.kind


def timed_build(params: SearchParams, passages: Path, index: Path) -> str:
    """Builds, and says what it took."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    build(params, passages, index)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return f"built in {wall_s:.1f} s ({cpu_s:.1f} CPU), {peak_mb():.0f} MB resident at most"


def recall(questions: Sequence[Question], found: Sequence[Sequence[Passage]], k: int) -> float:
    """The share of a question's gold titles that are among the titles of its best `k` passages, mean over questions."""
    golds = [set(question.gold_titles) for question in questions]
    hits = [len(gold & {passage.title for passage in best[:k]}) for gold, best in zip(golds, found, strict=True)]
    return sum(hit / len(gold) for hit, gold in zip(hits, golds, strict=True)) / len(golds)


def peak_mb() -> float:
    """The largest resident memory of this process so far, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def configured(kind: str | None, encoder: str | None, max_tokens: int | None) -> SearchParams:
    """The `search` section with what the command line says instead."""
    content = load(PARAMS).search.model_dump()
    content["kind"] = kind or content["kind"]
    content["dense"]["encoder"] = encoder or content["dense"]["encoder"]
    content["dense"]["max_tokens"] = max_tokens or content["dense"]["max_tokens"]
    return SearchParams.model_validate(content)


if __name__ == "__main__":
    parser = options("Measures recall, speed and size of an index.")
    parser.add_argument("--prepared", type=Path, default=Path("data/prepared"), help="questions and passages")
    parser.add_argument(
        "--index", type=Path, default=Path("data/benchmark_index"), help="where it is built, or is already"
    )
    parser.add_argument("--splits", nargs="+", default=["dev"])
    parser.add_argument("--limit", type=int, default=0, help="questions; 0 takes all")
    parser.add_argument("--fill", type=int, default=0, help="passages; 0 takes those there are")
    parser.add_argument("--rebuild", action="store_true")
    parser.add_argument("--kind", help="instead of search.kind")
    parser.add_argument("--encoder", help="instead of search.dense.encoder")
    parser.add_argument("--max-tokens", type=int, help="instead of search.dense.max_tokens")
    options = parser.parse_args()
    chosen = configured(options.kind, options.encoder, options.max_tokens)
    main(
        options.prepared,
        options.index,
        options.splits,
        options.limit,
        options.fill,
        options.rebuild,
        options.store,
        chosen,
    )
