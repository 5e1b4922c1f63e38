"""The race's table by hand, its signs, and contenders that are small shell scripts."""

from __future__ import annotations

import io

import pytest

from agent_r1.params import RunId
from benchmarks.peers.__main__ import QUIET, Lap, table
from benchmarks.peers.course import CONTENDERS, RUN, await_turn, settings_of, tell_lap, told, turn


def lap(seconds: float, cpu_s: float, others_s: float = 0.0) -> Lap:
    done = {"trajectories": 192, "tokens": 48000, "trained_share": 0.75, "success": 0.5}
    return Lap(seconds=seconds, cpu_s=cpu_s, others_s=others_s, **done)


def test_a_row_holds_the_medians_of_its_laps_and_compares_them_with_the_first() -> None:
    laps = {"first": [lap(16, 24)], "none": [], "fast": [lap(4, 6), lap(100, 100), lap(2, 3)]}
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(laps).splitlines()]
    assert [row[0] for row in rows] == ["first", "fast"]
    assert dict(zip(header[1:], rows[1][1:], strict=True)) == {
        "trajectories/s": "48.0",  # 192 in 4 s
        "to the first": "4.0",  # whose rate is 12 a second
        "per CPU second": "32.0",
        "to the first's": "4.0",
        "seconds": "4.0",
        "CPU seconds": "6.0",
        "cores busy": "1.50",
        "others'": "0.00",
        "tokens": "48,000",
        "trained": "75%",
        "right": "50%",
        "laps": "3",
    }


@pytest.mark.parametrize(("others_s", "clean"), [(0.9, True), (1.1, False)])
def test_a_lap_is_clean_while_others_have_little_of_a_core(others_s: float, clean: bool) -> None:
    assert lap(10, 12, others_s).is_clean(QUIET) is clean


def test_contenders_go_on_when_told_and_end_when_nobody_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(turn()))
    await_turn()
    tell_lap(trajectories=192, tokens=48000, trained_share=0.75, success=0.5)
    done = {"trajectories": 192, "tokens": 48000, "trained_share": 0.75, "success": 0.5}
    assert told(capsys.readouterr().out) == done
    assert told("loading\n") is None
    with pytest.raises(SystemExit):
        await_turn()


def test_every_contender_trains_the_same_episodes() -> None:
    runs = [settings_of(name).run(RunId(RUN)) for name in CONTENDERS]
    assert {(each.rollout.questions, each.rollout.samples) for each in runs} == {(24, 8)}
    assert [each.rollout.ahead for each in runs] == [0, 0, 0, 1, 1]
