"""The page in a real browser: what it shows, what it lets be done, and that text stays text."""

import base64
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from agent_r1.files import write_text
from agent_r1.inspection.report_page import report_page
from agent_r1.inspection.stored import PageTrajectory, When
from agent_r1.inspection.viewer import page
from agent_r1.records import CallStatus, Outcome
from tests.cases import cases

ABOUT: dict[str, Any] = {"facts": [["run", "ppo"]], "weights": {"em": 1.0}, "notes": ["Chosen by hand."]}
LAPTOP = {"width": 1440, "height": 900}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
EVIL = "</script><script>window.evil = 1</script><!-- <img src=x onerror=window.evil=2> \u2028 \u2029 &lt;b&gt; ]]>"

MakeEntry = Callable[..., PageTrajectory]
Open = Callable[..., Page]


@pytest.fixture
def open_groups(open_page: Open, words: Any) -> Open:
    def call(groups: Sequence[Sequence[PageTrajectory]], about: dict[str, Any] = ABOUT, **options: Any) -> Page:
        return open_page(page("ppo", about, groups, words.decode), **{"viewport": LAPTOP, **options})

    return call


@pytest.fixture
def four(make_entry: MakeEntry) -> list[list[PageTrajectory]]:
    """A question that is answered wrongly before training and rightly after, and two of training."""
    return [
        [make_entry("a", When.BEFORE, answer="Veld", hops=2), make_entry("a", When.AFTER, hops=2)],
        [make_entry("b", iteration=0, answer="no", status=CallStatus.FAILED)],
        [make_entry("c", iteration=3)],
    ]


def shown_rows(page: Page) -> list[str]:
    return [text.split(" · ")[0] for text in page.locator("#list .row .quiet").all_text_contents()]


def colours(page: Page) -> list[str]:
    return page.locator(".token").evaluate_all("all => all.map(one => one.dataset.is ?? '')")


def test_page_shows_markup_in_passage_as_text(open_groups: Open, make_entry: MakeEntry) -> None:
    entry = make_entry(EVIL, passage=EVIL, answer=EVIL)
    page = open_groups([[entry]])
    assert page.evaluate("window.evil") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert EVIL in str(page.locator(".observation .tokens").text_content())
    assert EVIL in str(page.locator("#question h2").text_content())
    assert EVIL in str(page.locator(".answer .tokens").text_content())


@pytest.mark.parametrize("env", ["qa", "frozen_lake"])
def test_page_shows_board_in_rows(open_groups: Open, make_entry: MakeEntry, env: str) -> None:
    entry = make_entry(passage="PIII\nWWWW")
    page = open_groups([[replace(entry, question=replace(entry.question, env=env))]])
    font = page.locator(".observation .tokens").evaluate("element => getComputedStyle(element).fontFamily")
    assert ("monospace" in font) == (env != "qa")


def test_step_shows_parts_and_rewards(open_groups: Open, make_entry: MakeEntry) -> None:
    page = open_groups([[make_entry()]])
    first, last = page.locator(".step").all()
    assert first.locator("summary").all_inner_texts() == ["THOUGHT", "TOOL CALL", "OBSERVATION"]
    assert first.locator(".chip").all_inner_texts() == ["ok", "valid_call +1", "reward 0"]
    assert last.locator("summary").all_inner_texts() == ["ANSWER"]
    assert last.locator(".chip").all_inner_texts() == ["em +1", "reward +1"]
    assert str(last.locator(".tokens").text_content()) == "<answer>Tesk</answer> <end>"


def test_aborted_episode_is_neither_right_nor_wrong(open_groups: Open, make_entry: MakeEntry) -> None:
    right, aborted = make_entry("a"), make_entry("b")
    page = open_groups([[right], [replace(aborted, trajectory=replace(aborted.trajectory, outcome=Outcome.ABORTED))]])
    assert page.locator("#list .mark").all_text_contents() == ["✓", "\N{EN DASH}"]
    assert page.locator("#count").text_content() == "2 of 2, 100 % right"
    page.select_option("#right", "not scored")
    assert page.locator("#list .mark").get_attribute("aria-label") == "not scored"


@cases("filter, value, rows")
def test_filter_selects_rows(open_groups: Open, four: Any, filter: str, value: str, rows: list[str]) -> None:
    page = open_groups(four)
    page.select_option(f"#{filter}", value)
    assert shown_rows(page) == rows
    assert str(page.locator("#count").text_content()).startswith(f"{len(rows)} of 4")
    page.click("#reset")
    assert len(shown_rows(page)) == 4


def test_address_sets_filters(open_groups: Open, four: Any) -> None:
    failures = {"turn limit": ["3/c/0"], "repeated call": ["0/b/0", "3/c/0"]}
    page = open_groups(four, {**ABOUT, "failures": failures})
    address = page.url
    for fragment, rows in {
        "kind=turn+limit": ["iteration 3"],
        "kind=turn+limit&right=wrong": [],
        "kind=is+not+there": [],
        "constructor=1&sort=99&low=x": ["before training", "iteration 0", "iteration 3", "after training"],
    }.items():
        page.goto("about:blank")
        page.goto(f"{address}#{fragment}")
        page.wait_for_selector("html[data-ready=true]")
        assert shown_rows(page) == rows
    page.goto(f"{address}#kind=repeated+call")  # in the page that is open
    page.wait_for_function("document.querySelector('#list').children.length === 2")
    assert page.input_value("#kind") == "repeated call"
    page.goto(f"{address}#kind=turn+limit")
    expect(page.locator(".column > header b")).to_have_text(["iteration 3"])
    page.click("#reset")
    assert len(shown_rows(page)) == 4


def test_returns_and_words_filter_rows(open_groups: Open, four: Any) -> None:
    page = open_groups(four)
    page.fill("#low", "0.5")
    assert shown_rows(page) == ["iteration 3", "after training"]
    page.fill("#high", "0.9")
    assert shown_rows(page) == []
    page.click("#reset")
    page.fill("#search", "WHO IS IT (C)")
    assert shown_rows(page) == ["iteration 3"]
    page.locator("#list .row").click()
    page.fill("#search", "look it up")
    assert len(shown_rows(page)) == 4
    assert page.locator(".hit").all_text_contents() == ["<think>Look", " it", " up.</think>"]


def test_two_answers_to_one_question_stand_side_by_side(open_groups: Open, four: Any) -> None:
    page = open_groups(four)
    assert page.locator(".column").count() == 2
    heads = page.locator(".column > header b").all_inner_texts()
    assert heads == ["before training", "after training"]
    left, right = (column.bounding_box() or {} for column in page.locator(".column").all())
    assert (left["x"] + left["width"] <= right["x"], left["y"]) == (True, right["y"])
    page.keyboard.press("c")
    assert page.locator(".column > header b").all_inner_texts() == ["before training"]
    page.keyboard.press("j")
    assert page.locator(".column > header b").all_inner_texts() == ["iteration 0"]


def test_colours_follow_chosen_numbers(open_groups: Open, make_entry: MakeEntry) -> None:
    page = open_groups([[make_entry()]])
    assert page.locator("#colouring option").all_inner_texts() == [
        "source", "loss mask", "advantage", "sampler \N{MINUS SIGN} learner", "surprise", "nothing",
    ]  # fmt: skip
    page.keyboard.press("p")
    source = colours(page)
    assert (source[0], source[-1]) == ("source-0", "source-1")
    page.keyboard.press("2")
    assert [colour == "loss-1" for colour in colours(page)] == [colour == "source-1" for colour in source]
    page.keyboard.press("3")
    assert [colour == "plus" for colour in colours(page)] == [colour == "source-1" for colour in source]
    assert "+1.5" in str(page.locator("#legend").text_content())


def test_token_shows_its_numbers(open_groups: Open, make_entry: MakeEntry) -> None:
    page = open_groups([[make_entry()]])
    page.keyboard.press("ArrowRight")
    text = str(page.locator("#inspector").inner_text()).replace("\n", " ")
    assert '"<think>Look"' in text
    assert "gap +0.25" in text  # -0.25 less -0.5
    assert "advantage +1.5" in text
    assert "in the loss" in text
    page.locator(".observation .token").last.hover()
    assert "template" in page.locator("#inspector").inner_text()


def test_phone_shows_list_then_one_trajectory(open_groups: Open, four: Any) -> None:
    page = open_groups(four, **PHONE)
    expect(page.locator("#list")).to_be_visible()
    expect(page.locator("#reading")).to_be_hidden()
    page.locator("#list .row").nth(1).tap()
    expect(page.locator("#list")).to_be_hidden()
    expect(page.locator(".column")).to_have_count(1)
    page.locator(".answer .token").first.tap()
    assert "log p" in page.locator("#inspector").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#back").tap()
    expect(page.locator("#list")).to_be_visible()


def test_page_may_connect_nowhere(browser: Any, make_entry: MakeEntry, words: Any, tmp_path: Any) -> None:
    """Not even by a script that is run inside it."""
    file = tmp_path / "page.html"
    file.write_text(page("ppo", ABOUT, [[make_entry()]], words.decode))
    context = browser.new_context()
    open_groups = context.new_page()
    open_groups.goto(file.as_uri())
    outcome = open_groups.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', (fault) => String(fault))")
    refused = open_groups.evaluate(
        """() => new Promise((done) => {
          document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
          setTimeout(() => done("nothing"), 5000);
          document.body.append(Object.assign(new Image(), {src: "http://127.0.0.1:9/x.png"}));
        })"""
    )
    context.close()
    assert "Failed to fetch" in outcome
    assert refused == "img-src"


def test_report_page_holds_pair(four: list[list[PageTrajectory]], words: Any, browser: Browser, tmp_path: Path) -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    (tmp_path / "report").mkdir()
    (tmp_path / "report/dot.png").write_bytes(base64.b64decode(pixel))
    text = f"# Report\n\n{EVIL}\n\n![A dot](dot.png)\n\n| agent | all |\n| --- | ---: |\n| `ppo` | 0.565 |\n"
    (tmp_path / "report/report.md").write_text(text)
    file = tmp_path / "shared/report.html"
    write_text(file, report_page(tmp_path / "report", page("ppo", ABOUT, four[:1], words.decode)))
    shutil.rmtree(tmp_path / "report")
    faults: list[str] = []
    with browser.new_context(viewport=LAPTOP, offline=True) as context:
        open_groups = context.new_page()
        open_groups.on("pageerror", lambda error: faults.append(str(error)))
        open_groups.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        open_groups.goto(file.as_uri())
        assert open_groups.evaluate("document.images[0].naturalWidth") == 1
        assert open_groups.locator("td").all_text_contents() == ["ppo", "0.565"]
        inside = open_groups.frame_locator("iframe")
        expect(inside.locator("#list .row")).to_have_count(2)
        inside.locator("#list .row").first.click()
        expect(inside.locator(".answer .tokens").first).to_contain_text("Veld")
        assert open_groups.evaluate("window.evil") is None
    assert faults == []
