"""Every engine keeps the same promises, vLLM in own processes and behind a URL among them; its own come last."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from agent_r1.envs.kinds import attempts_at
from agent_r1.envs.shared import Shared
from agent_r1.learn import checkpoint
from agent_r1.learn.learner import Learner, Options
from agent_r1.params import load
from agent_r1.params.env import Order
from agent_r1.params.stages import LoraParams
from agent_r1.records import CallStatus, Source, StopReason
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.episodes import collect, compare
from agent_r1.rollout.sampling import Action, Engine, EngineError, EngineRestarted, EngineUnavailable, Flowing, Request
from agent_r1.rollout.vllm_engine import VllmEngine, claim_scratch, places
from agent_r1.seeds import derive
from agent_r1.training.loop import iterate
from agent_r1.weight_sums import differing, sums_of
from tests.answering import Heard, Said, answering
from tests.cases import cases
from tests.fixtures import Task
from tests.learn.learning import move
from tests.rollout.turns import CONTEXTS, LIMITS, InTurn, run, without_latency

CLOSE = 1e-4  # nats, in float32
ROOT = Path(__file__).parents[2]

Open = Callable[..., Engine]


@pytest.fixture(scope="module", params=["vllm", "transformers", "server"])
def open_kind(request: pytest.FixtureRequest, opener: Callable[..., Open]) -> Open:
    """`open_engine` for each kind; vLLM runs in two processes, and a batch of transformers is small: it has several."""
    match request.param:
        case "server":
            return opener("server", urls=[request.getfixturevalue("engine_server")])
        case "transformers":
            return opener("transformers", batch_size=10)
    return opener("vllm", replicas=2)


@pytest.fixture(scope="module")
def engine(open_kind: Open, tiny_model: Path) -> Iterator[Engine]:
    """Samples with the weights that the last test loaded; a test that minds loads its own."""
    with open_kind(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(opener: Callable[..., Open], tiny_model: Path) -> Iterator[VllmEngine]:
    """One process of vLLM, with the weights that the last test loaded."""
    with opener("vllm")(tiny_model) as engine:
        assert isinstance(engine, VllmEngine)
        yield engine


def requests(count: int = 24, max_tokens: int = 30) -> list[Request]:
    rng = np.random.default_rng(0)
    contexts = [rng.integers(0, 256, 20 + index % 21).tolist() for index in range(count)]
    return [
        Request(episode=index, step=0, context=context, seed=derive(index), max_tokens=max_tokens)
        for index, context in enumerate(contexts)
    ]


def model_at(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, request: Request, action: Action) -> NDArray[np.float32]:
    """[N] the logprobs of an action's tokens, by transformers."""
    ids = torch.tensor([request.context + action.token_ids])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(request.context) - 1 :].numpy()


def bits(actions: list[Action]) -> list[tuple[list[int], bytes]]:
    return [(action.token_ids, action.logprobs.tobytes()) for action in actions]


CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Veld"}}\n</tool_call>'
CALLS = LIMITS.model_copy(update={"max_tokens": 256, "max_action_tokens": 64, "max_steps": 2})
ONE_CALL = CALLS.model_copy(update={"max_steps": 1})


@pytest.fixture(scope="module")
def calling(one_action_task: Callable[..., Task]) -> Task:
    """A model of the tiny one's shape that was shown a search for every question."""
    return one_action_task(dict.fromkeys(["A?", "B?", "C?", "D?"], "Tesk"), lambda _: CALL, steps=150, env=ONE_CALL)


def test_tools_are_called_whatever_the_engine_and_the_order(engine: Engine, calling: Task, chat: Chat) -> None:
    """And what they return is read."""
    engine.load_weights(calling.model, version=0)
    orders: list[Order] = ["rounds", "arrival"] if isinstance(engine, Flowing) else ["rounds"]
    for order in orders:
        with Shared(CALLS.model_copy(update={"order": order}), calling.index) as shared:
            rows = collect(engine, chat, attempts_at(calling.questions, shared, samples=4), shared, seed=0)
        called = [row for row in rows if row.steps[0].call_status is CallStatus.OK]
        read = [chat.decode(row.ids(slice(None), Source.OBSERVATION)) for row in called]
        assert len(called) > len(rows) / 2, order
        assert all("Tesk is a city." in text for text in read), order


@pytest.fixture(scope="module")
def changed_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with embeddings moved far enough to change its actions; they are tied to its output."""
    model = model_at(tiny_model)
    generator = torch.Generator().manual_seed(1)
    weight = model.get_input_embeddings().weight
    assert weight is model.get_output_embeddings().weight
    weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    folder = tmp_path_factory.mktemp("changed")
    model.save_pretrained(folder)
    return folder


def test_actions_end_with_the_end_token_or_at_their_limit(engine: Engine, chat: Chat) -> None:
    asked = requests(200)
    actions = engine.sample(asked)
    assert {action.stop_reason for action in actions} == {StopReason.END, StopReason.LENGTH}
    for request, action in zip(asked, actions, strict=True):
        assert len(action.token_ids) == len(action.logprobs) <= request.max_tokens
        assert chat.end_id not in action.token_ids[:-1]
        assert (action.stop_reason is StopReason.END) == (action.token_ids[-1] == chat.end_id)
        assert action.stop_reason is StopReason.END or len(action.token_ids) == request.max_tokens
    assert all(len(action.token_ids) == 1 for action in engine.sample(requests(4, max_tokens=1)))


def test_logprobs_are_the_learners_whatever_was_loaded(engine: Engine, tiny_model: Path, changed_model: Path) -> None:
    """Law 6. Without the refresh of the tied output layer they would be off by more than 1."""
    for folder, version, other in [(changed_model, 1, tiny_model), (tiny_model, 2, changed_model)]:
        engine.load_weights(folder, version)
        assert engine.version == version
        learner, stale = model_at(folder), model_at(other)
        gaps, apart = [], []
        for request, action in zip(requests(), engine.sample(requests()), strict=True):
            logprobs = logprobs_of(learner, request, action)
            gaps.append(np.abs(action.logprobs - logprobs).max())
            apart.append(np.abs(logprobs_of(stale, request, action) - logprobs).max())
        assert max(gaps) < CLOSE
        assert max(apart) > 1
        sums = sums_of(learner.state_dict().items(), torch.float32)
        assert [held.sums for held in engine.held()] == [sums] * engine.homes


def test_new_weights_are_sampled_with_no_old_cache(engine: Engine, tiny_model: Path, changed_model: Path) -> None:
    """The contexts are in the prefix cache of the old weights: sampling again must not use it."""
    engine.load_weights(tiny_model, version=0)
    long = [Request(episode=0, step=0, context=[*range(256)], seed=0, max_tokens=8)]
    engine.sample(long)
    engine.load_weights(changed_model, version=1)
    [action] = engine.sample(long)
    assert np.abs(logprobs_of(model_at(changed_model), long[0], action) - action.logprobs).max() < CLOSE


def test_the_same_requests_give_the_same_actions(engine: Engine, tiny_model: Path) -> None:
    """In the same company bit for bit; alone, or after others, up to rounding."""
    engine.load_weights(tiny_model, version=0)
    asked = requests()
    first = engine.sample(asked)
    engine.load_weights(tiny_model, version=0)
    again, alone, turned = engine.sample(asked), engine.sample(asked[:1]), engine.sample(asked[::-1])
    assert bits(again) == bits(first)
    for other, actions in ((again, first), (alone, first[:1]), (turned, first[::-1])):
        for one, action in zip(other, actions, strict=True):
            assert one.token_ids == action.token_ids
            assert np.abs(one.logprobs - action.logprobs).max() < CLOSE
    shared = [Request(episode=i, step=0, context=[1, 2, 3], seed=i, max_tokens=8) for i in range(8)]
    assert len({tuple(action.token_ids) for action in engine.sample(shared)}) == 8, "every seed has its own draws"


def test_greedy_tokens_are_the_learners_likeliest(engine: Engine, changed_model: Path) -> None:
    """So all engines agree on them, also one that samples else. Their logprobs are those of temperature 1."""
    engine.load_weights(changed_model, version=1)
    asked = [replace(request, greedy=True) for request in requests(12, max_tokens=5)]
    model = model_at(changed_model)
    for request, action in zip(asked, engine.sample(asked), strict=True):
        likeliest = model(torch.tensor([request.context + action.token_ids])).logits[0].argmax(-1).tolist()
        assert likeliest[len(request.context) - 1 : -1] == action.token_ids
        assert np.abs(logprobs_of(model, request, action) - action.logprobs).max() < CLOSE


@pytest.mark.parametrize("kind", ["transformers", "server", "vllm"])
def test_a_model_that_is_not_there_is_told(kind: str, opener: Callable[..., Open], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="config"):
        opener(kind, **({"urls": ["http://127.0.0.1:1"]} if kind == "server" else {}))(tmp_path)


@pytest.mark.parametrize("open_kind", ["vllm"], indirect=True)
def test_two_processes_have_ones_bits(engine: Engine, alone: VllmEngine, tiny_model: Path, changed_model: Path) -> None:
    """Each process has half of the episodes, asked for in any order, and weights of its own."""
    assert isinstance(engine, VllmEngine)
    assert engine.homes == len(set(engine.pids)) == 2
    asked = requests()
    for version, folder in enumerate([changed_model, tiny_model]):
        alone.load_weights(folder, version)
        engine.load_weights(folder, version)
        assert bits(engine.sample(asked)) == bits(alone.sample(asked))
        assert bits(engine.sample(asked[5:7][::-1])) == bits(alone.sample(asked[5:7]))[::-1]


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("open_kind", ["vllm"], indirect=True)
def test_nothing_is_left_of_an_engine_of_which_one_process_was_killed(engine: Engine) -> None:
    """The last test of this one."""
    assert isinstance(engine, VllmEngine)
    folders = [process._scratch for process in engine._processes]
    assert all(len([*folder.iterdir()]) > 1 for folder in folders), "a socket is there; vLLM's files prove something"
    os.kill(engine.pids[1], signal.SIGKILL)
    with pytest.raises(EngineRestarted, match="ended with code -9"):  # a ConnectionError, which ends a stage with 75
        engine.sample(requests(2, max_tokens=5))
    engine.close()
    assert not any(map(is_running, engine.pids))
    assert not any(folder.exists() for folder in folders)


@cases("replicas, parts, threads, gpus, found")
def test_where_processes_run(
    monkeypatch: pytest.MonkeyPatch, replicas: int, parts: int, threads: int, gpus: list[str], found: Any
) -> None:
    """A single one is left all that there is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    changed = {"replicas": replicas, "tensor_parallel_size": parts, "threads": threads}
    settings = load(ROOT / "params.yaml").engine.vllm.model_copy(update=changed)
    if isinstance(found, str):
        with pytest.raises(EngineError, match=found):
            places(settings, gpus)
    else:
        assert places(settings, gpus) == found


def test_a_replica_in_two_parts_says_what_one_does(
    opener: Callable[..., Open], alone: VllmEngine, tiny_model: Path, changed_model: Path, tmp_path: Path
) -> None:
    """Each holds one of the two attention heads; sums in another order round otherwise, and new weights reach both.

    A fault of one has its reason, which vLLM only logs.
    """
    asked = requests(8, max_tokens=12)
    alone.load_weights(tiny_model, 0)
    with opener("vllm", tensor_parallel_size=2)(tiny_model) as engine:
        assert isinstance(engine, VllmEngine)
        parts = psutil.Process(engine.pids[0]).children()
        assert len(parts) >= 2
        for version in (1, 2):
            found, expected = ([*each.sample(asked)] for each in (engine, alone))
            assert [action.token_ids for action in found] == [action.token_ids for action in expected]
            gaps = [np.abs(ours.logprobs - other.logprobs).max() for ours, other in zip(found, expected, strict=True)]
            assert 0 < max(gaps) < CLOSE
            for each in (engine, alone):
                each.load_weights(changed_model, version)
            assert [held.sums for held in engine.held()] == [held.sums for held in alone.held()]
        shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors").write_bytes(b"cut off")
        with pytest.raises(EngineError, match=r"vLLM's log: .*SafetensorError: .*header"):  # that of a part
            engine.load_weights(tmp_path, 3)
        os.kill(engine.pids[0], signal.SIGKILL)
        psutil.wait_procs(parts, timeout=20)
        assert not any(part.is_running() for part in parts)


def test_vllm_gives_the_same_bits_whoever_meets_whom(alone: VllmEngine, chat: Chat, tiny_model: Path) -> None:
    """In rounds, in three orders of waiting after one that was given up, and under proof; then it is killed."""
    alone.load_weights(tiny_model, version=0)

    def waits(seed: int) -> list[Callable[[], Any]]:
        return [InTurn(seed).wait] * 24

    rounds = without_latency(run(chat, alone, waits(0), steps=3, order="rounds"))
    assert len({each[0] for each in rounds}) > 20, "the same actions everywhere would prove little"

    async def broken() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        run(chat, alone, [*waits(0), broken], steps=3)
    for seed in range(3):
        alone.load_weights(tiny_model, version=seed)
        assert without_latency(run(chat, alone, waits(seed), steps=3)) == rounds
    with Shared(LIMITS) as shared:
        exact = LIMITS.model_copy(update={"order": "exact_arrival"})
        assert set(shared.run(compare(alone, CONTEXTS, exact)).values()) == {0.0}
    os.kill(alone.pids[0], signal.SIGKILL)
    with pytest.raises(EngineRestarted, match="ended with code -9"):
        run(chat, alone, waits(0))


OPEN = """
import sys
from pathlib import Path
from agent_r1.params import load
from agent_r1.rollout.engines import open_engine
from agent_r1.rollout.sampling import Actor
settings = load(Path("params.yaml")).engine
actor = Actor(model=sys.argv[1], end_ids=[0], max_tokens=64, temperature=1.0, dtype="auto")
with open_engine(settings, actor) as engine:
    print(*engine.pids, flush=True)
    sys.stdin.read()
"""


def test_killed_parent_leaves_no_engine(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process ends, and the next start removes its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parent = subprocess.Popen(
        [sys.executable, "-c", OPEN, str(tiny_model)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    orphan = int(parent.stdout.readline())
    in_use, claim = claim_scratch()
    [left] = set(tmp_path.glob("agent_r1_engine_*")) - {in_use}
    assert len([*left.iterdir()]) > 1, "a socket is there; vLLM's files prove something"
    parent.kill()
    parent.communicate()  # until the orphan, which has the same output, has ended too
    assert not is_running(orphan)
    new, other = claim_scratch()
    assert {path for path in tmp_path.iterdir() if "inductor" not in path.name} == {in_use, new}
    for descriptor in (claim, other):
        os.close(descriptor)


@pytest.mark.parametrize("open_kind", ["server"], indirect=True)
def test_a_server_says_what_it_refuses(open_kind: Open, tiny_model: Path) -> None:
    with pytest.raises(EngineError, match=r"reads 1024 tokens at most.* env.max_tokens"):
        open_kind(tiny_model, max_tokens=2048)
    too_long = Request(episode=0, step=0, context=[1] * 1024, seed=0, max_tokens=1)
    with open_kind(tiny_model) as engine, pytest.raises(EngineError, match=r"refused /inference/v1/generate.*1024"):
        engine.sample([too_long])


@pytest.mark.parametrize("open_kind", ["server"], indirect=True)
def test_server_has_bits_of_process(engine: Engine, alone: VllmEngine, tiny_model: Path, changed_model: Path) -> None:
    for version, folder in enumerate([changed_model, tiny_model]):
        alone.load_weights(folder, version)
        engine.load_weights(folder, version)
        expected = bits(alone.sample(requests(96)))
        assert [bits(engine.sample(requests(96))) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("open_kind", ["server"], indirect=True)
def test_plain_reload_is_noticed(open_kind: Open, engine_server: str, tiny_model: Path, changed_model: Path) -> None:
    """vLLM's own, on a CPU, without the remedy of the worker's extension."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(changed_model)}}
    state = model_at(changed_model).state_dict()
    with open_kind(tiny_model) as engine:
        httpx.post(f"{engine_server}/collective_rpc", json=reload, timeout=60).raise_for_status()
        [held] = engine.held()
        assert differing(held.sums, sums_of(state.items(), torch.float32)) == ["lm_head.weight"]


def test_a_server_that_dies_amid_its_answers_changes_no_bit(
    opener: Callable[..., Open], tiny_model: Path, engine_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one answers in its place, with the weights of then and with new ones; alone it would be an error.

    It is another way to the same server, which ends every connection after so many answers.
    """
    answers = Semaphore(4 + 32 + 5)  # to the opening, to half of the first round, and to a few of the second

    def relay(asked: Heard) -> Said | None:
        answer = httpx.post(f"{engine_server}{asked.path}", json=asked.body, timeout=60)
        return (answer.status_code, answer.content) if answers.acquire(blocking=False) else None

    asked = requests(64, max_tokens=60)
    with answering(relay) as url:
        with opener("server", urls=[engine_server, url], retries=0)(tiny_model) as engine:
            assert engine.homes == 2
            expected = bits(engine.sample(asked))
            assert bits(engine.sample(asked)) == expected
            engine.load_weights(tiny_model, version=1)
            assert bits(engine.sample(asked)) == expected
        told = f"{url} is left out until the next weights"
        assert caplog.text.count(told) == 2, "when it fails, and at the next weights"
        with pytest.raises(EngineUnavailable, match=url):
            opener("server", urls=[url], retries=0)(tiny_model)


def test_server_samples_proved_training(calling: Task, open_training: Callable[..., Any], engine_server: str) -> None:
    """The entropy bonus makes every iteration an update."""
    update = {"learning_rate": 1e-3, "entropy_bonus": 0.01}
    changes = {"iterations": 3, "credit": {"estimator": "grpo"}, "update": update}
    engine = {"kind": "server", "server": {"urls": [engine_server]}}
    with open_training(calling, changes, ONE_CALL, engine) as training:
        iterate(training)
    assert training.learner.policy_version == 3
    assert all(line["rollout/canary_gap"] < CLOSE for line in training.folder.history())


ADAPTED = [
    Request(episode=index, step=0, context=[*range(index, index + 20 + index)], seed=index, max_tokens=12)
    for index in range(6)
]


@pytest.fixture
def make(tiny_model: Path) -> Callable[[], Learner]:
    """Learners over the tiny model with fresh adapters of rank 4."""
    adapter = LoraParams(rank=4, alpha=8, targets=["all-linear"])
    settings = load(ROOT / "params.yaml")
    model = settings.model.model_copy(update={"lora": adapter})
    options = Options(device=torch.device("cpu"), merges=False)
    return lambda: Learner(tiny_model, settings.train.update, model, with_critic=False, seed=0, options=options)


def save(learner: Learner, folder: Path) -> Path:
    """A checkpoint whose policy holds only adapters, so that nothing else can be loaded."""
    checkpoint.save(folder, learner, checkpoint.Progress(iterations=1, policy_version=learner.policy_version))
    assert checkpoint.is_adapters_alone(folder / "policy")
    return folder / "policy"


@torch.no_grad()
def gap(learner: Learner, actions: list[Action]) -> float:
    """The largest difference in nats between the sampler's and the learner's logprobs of the actions."""
    pairs = zip(ADAPTED, actions, strict=True)
    return max(float(np.abs(logprobs_of(learner.policy, *pair) - pair[1].logprobs).max()) for pair in pairs)


@pytest.mark.parametrize(("kind", "begins"), [("vllm", True), ("transformers", False)])
def test_the_sampler_runs_the_learners_adapters(
    kind: str, begins: bool, make: Callable[[], Learner], opener: Callable[..., Open], tiny_model: Path, tmp_path: Path
) -> None:
    """From the start, where it begins with some too, after each of two updates, and back to the first, which has gone.

    And forth to the second with the same bits.
    """
    learner, drawn = make(), torch.get_rng_state()
    given: dict[str, Any] = {}
    if begins:
        move(learner)
        given = {"adapters": str(save(learner, tmp_path / "begun")), "version": learner.policy_version}
    with opener(kind)(tiny_model, max_tokens=128, adapter_rank=4, **given) as engine:
        before = engine.sample(ADAPTED)
        assert (engine.version, gap(learner, before) < CLOSE) == (learner.policy_version, True)
        for name in ("1", "2"):
            move(learner)
            assert gap(learner, before) > 0.1, "an update that changes nothing would prove nothing"
            engine.load_weights(save(learner, tmp_path / name), learner.policy_version)
            before = engine.sample(ADAPTED)
            assert (engine.version, gap(learner, before) < CLOSE) == (learner.policy_version, True)
        assert torch.equal(torch.get_rng_state(), drawn), "the learner's checkpoint has it"
        good = make()
        engine.load_weights(tmp_path / "1" / "policy", checkpoint.load(tmp_path / "1", good).policy_version)
        shutil.rmtree(tmp_path / "1")  # a checkpoint is replaced while its policy is sampled with
        assert gap(good, engine.sample(ADAPTED)) < CLOSE
        engine.load_weights(tmp_path / "2" / "policy", learner.policy_version)
        assert bits(engine.sample(ADAPTED)) == bits(before)
