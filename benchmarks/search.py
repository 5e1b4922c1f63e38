"""What an index finds, and what it costs: `python -m benchmarks.search --prepared data/prepared --kind bm25`.

Builds the index of params.yaml over the passages of a prepared data set, in a process of its own, and asks it the
questions of some splits. Questions without gold passages are left out. Prints recall at 2, 5 and 10, milliseconds per
query, the index's size on disk, seconds to build it, and the largest resident memory of the build and of the search; of
times also the processor's, which another process on the machine does not lengthen. `--store` keeps the recall.

`--fill 400000` fills the passages up to so many with drawn ones, a dense index's with vectors drawn about those that
the encoder gives the others. It counts what the build and 64 queries take, alone and together, with their encoding.
BM25 has 640 episodes search at the same time, on the loop and beside it as tools do: CPU milliseconds a query, seconds
of the loop's thread, and the longest time in which the loop served nobody. `--store` keeps these instead.
`--set dense.faiss=sq8` is instead of what params.yaml has. With `--prepare` the passages are written as lines like
wiki-18's, and prepared anew.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from agent_r1.data.prepare import prepare
from agent_r1.params import load
from agent_r1.params.prepare import FilesParams
from agent_r1.params.search import DenseParams, SearchParams
from agent_r1.params.sections import changed, override
from agent_r1.records import Passage, Question
from agent_r1.search.base import BATCH, full_texts, read_batches
from agent_r1.search.index import Cached, build, describe, open_index
from agent_r1.search.together import Together
from agent_r1.tables import read_rows, row_writer
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
    prepare_lines: bool,
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
    cost: Row = {}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        if fill:
            passages = pool.apply(filled, (passages, fill))
            if params.kind == "dense":
                vectors = pool.apply(drawn, (prepared / "passages.parquet", params.dense, fill))
                params = params.model_copy(update={"dense": params.dense.model_copy(update={"vectors": str(vectors)})})
        if prepare_lines:
            show("search_prepare", [pool.apply(timed_prepare, (passages,))], store=store)
            return
        if rebuild or not index.is_dir():
            cost = pool.apply(timed_build, (params, passages, index))
    search = open_index(params.model_copy(update={"cache_entries": 0}), passages, index)
    search.search([questions[0].text], max(DEPTHS))  # the first search loads what later ones share
    megabytes = sum(file.stat().st_size for file in index.rglob("*") if file.is_file()) / 1e6
    print(f"{params.kind}: {describe(index).size} passages, {megabytes:.1f} MB on disk")
    if fill:
        row = {"kind": in_words(params), "passages": f"{fill:,}", **cost, **of_queries(search, questions, index, fill)}
        show("search_sizes", [row], store=store, keys=2)
        if params.kind == "bm25":
            show("search_loop", in_one_iteration(search, questions, fill), store=store, keys=2)
        return
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = search.search([question.text for question in questions], max(DEPTHS))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
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
    """A file beside the source with its passages, and others up to the count, of the source's lengths and titles.

    Their words are drawn by how often the source has them, as Zipf's law says, and one of 50 from Zipf's law over words
    that the source has not: a vocabulary grows with its corpus.
    """
    path = source.with_name(f"passages-{count}.parquet")
    if path.exists():
        return path
    rows = read_rows(source, Passage)
    texts = [row.text.split() for row in rows]
    frequencies = Counter(chain.from_iterable(texts))
    vocabulary = np.array([*frequencies], object)
    shares = np.cumsum([*frequencies.values()]) / frequencies.total()
    draws = np.random.default_rng(7)
    with row_writer(path, Passage) as write:
        for number, row in enumerate(rows[:count]):
            write(replace(row, passage_id=str(number)))
        for number in range(len(rows), count):
            size = max(1, len(texts[draws.integers(len(rows))]))
            words = vocabulary[np.searchsorted(shares, draws.random(size))]
            new = draws.random(size) < 0.02
            words[new] = [f"w{rank}" for rank in draws.zipf(1.15, new.sum())]
            title = rows[draws.integers(len(rows))].title
            write(Passage(passage_id=str(number), title=title, text=" ".join(words)))
    return path


def drawn(source: Path, params: DenseParams, count: int) -> Path:
    """A flat FAISS index beside a file of passages: their vectors, and others up to the count, drawn about these.

    Noise of length .6 leaves a cosine of .86 with the one that it was drawn about.
    """
    path = source.with_name(f"vectors-{count}.index")
    if path.exists():
        return path
    index = encoded(source, params)
    real = index.reconstruct_n(0, index.ntotal)
    draws = np.random.default_rng(7)
    for start in range(len(real), count, BATCH):
        size = min(BATCH, count - start)
        noise = draws.standard_normal((size, index.d), dtype=np.float32) * 0.6 / index.d**0.5
        vectors = real[draws.integers(len(real), size=size)] + noise
        index.add(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    faiss.write_index(index, str(path))
    return path


def encoded(source: Path, params: DenseParams) -> Any:
    """A flat FAISS index of a file of passages, which is kept beside it."""
    from agent_r1.search.dense import SHARD, Encoder

    path = source.with_name("vectors.index")
    if not path.exists():
        encoder = Encoder(params)
        index = faiss.IndexFlatIP(encoder.dimensions)
        for batch in read_batches(source, SHARD):
            index.add(encoder.passages(full_texts(batch, " ")))
        faiss.write_index(index, str(path))
    return faiss.read_index(str(path))


def of_queries(search: Cached, questions: Sequence[Question], index: Path, size: int) -> Row:
    """What queries cost alone and in batches, and the index on disk, without the passages' texts."""
    texts = [question.text for question in questions[:64]]
    few = texts[:16]
    alone = cpu_ms(lambda: [search.search([text], TOP_K) for text in few])
    together = cpu_ms(lambda: [search.search(texts, TOP_K)])
    folders = [folder for name in ("bm25", "dense") if (folder := index / name).is_dir()]
    kept = sum(file.stat().st_size for folder in folders for file in folder.iterdir()) / size
    return {
        "bytes a passage": f"{kept:.0f}",
        "CPU of a query": f"{alone / len(few):.1f} ms",
        "in batches of 64": f"{together / len(texts):.1f} ms",
        "640 episodes, 2.2 searches each": f"{SEARCHES * together / len(texts) / 1e3:.1f} s",
        "21 million passages": f"{21e6 * kept / 1e9:.1f} GB",
    }


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds of some work, done a second time."""
    work()
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


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
    if params.kind != "dense":
        return params.kind
    parts = [
        f"dense, {dense.faiss}",
        f"{dense.pq_bytes} bytes" if dense.pq_bytes else "",
        f"{dense.nprobe} of {dense.nlist} clusters" if dense.nlist else "",
        f"{dense.rescore} rescored" if dense.rescore else "",
    ]
    return ", ".join(filter(None, parts))


def timed_build(params: SearchParams, passages: Path, index: Path) -> Row:
    """Builds, and says what it took. Drawn vectors are none that the encoder gives."""
    if params.dense.vectors:
        from agent_r1.search import dense

        dense.OWN = 0.0
    start = time.process_time()
    build(params, passages, index)
    return {
        "CPU of the build": f"{time.process_time() - start:.0f} s",
        "memory of the build": f"{peak_mb() / 1e3:.2f} GB",
    }


def timed_prepare(passages: Path) -> Row:
    """Prepares passages from lines as wiki-18 has them, and says what it took."""
    corpus = passages.with_suffix(".jsonl")
    count = 0
    with corpus.open("w") as file:
        for batch in read_batches(passages):
            count += batch.num_rows
            for row in batch.to_pylist():
                contents = f'"{row["title"]}"\n{row["text"]}'
                file.write(json.dumps({"id": row["passage_id"], "contents": contents}) + "\n")
    question = passages.with_name("question.jsonl")
    question.write_text(json.dumps({"question": "Who?", "answer": "Mara"}))
    own = {"format": "generic", "dev": {"file": question}, "corpus": corpus}
    params = load(PARAMS).prepare.model_copy(
        update={"datasets": ["own"], "files": {"own": FilesParams.model_validate(own)}}
    )
    start = time.process_time()
    prepare(params, passages.with_name("again"))
    return {
        "lines": f"{count:,}",
        "size": f"{corpus.stat().st_size / 1e9:.2f} GB",
        "CPU": f"{time.process_time() - start:.0f} s",
        "memory": f"{peak_mb():.0f} MB",
    }


def recall(questions: Sequence[Question], found: Sequence[Sequence[Passage]], k: int) -> float:
    """The share of a question's gold titles that are among the titles of its best `k` passages, mean over questions."""
    golds = [set(question.gold_titles) for question in questions]
    hits = [len(gold & {passage.title for passage in best[:k]}) for gold, best in zip(golds, found, strict=True)]
    return sum(hit / len(gold) for hit, gold in zip(hits, golds, strict=True)) / len(golds)


def peak_mb() -> float:
    """The largest resident memory of this process so far, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def configured(kind: str | None, encoder: str | None, max_tokens: int | None, others: Sequence[str]) -> SearchParams:
    """The `search` section with what the command line says instead."""
    content = load(PARAMS).search.model_dump()
    for assignment in others:
        content = override(content, changed(assignment))
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
    parser.add_argument("--prepare", action="store_true", help="the passages anew, and build nothing")
    parser.add_argument("--kind", help="instead of search.kind")
    parser.add_argument("--encoder", help="instead of search.dense.encoder")
    parser.add_argument("--max-tokens", type=int, help="instead of search.dense.max_tokens")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of search, such as dense.nlist=8")
    options = parser.parse_args()
    chosen = configured(options.kind, options.encoder, options.max_tokens, options.set)
    main(
        options.prepared,
        options.index,
        options.splits,
        options.limit,
        options.fill,
        options.rebuild,
        options.prepare,
        options.store,
        chosen,
    )
