"""README.md and docs/ tell the truth: their figures are stored, their names exist, their code is valid."""

import inspect
import json
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from agent_r1.params import Params, load
from agent_r1.params.sections import override, validated
from agent_r1.training import loop
from benchmarks.hostile.campaign import KINDS
from benchmarks.stored import ORIGIN, stored
from docs import commands as commands_page
from docs.results import BLOCK, PAGES, filled, table
from flows import commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Where git keeps the scores that a report of docs/ shows, and below which heading.
SCORES = {f"docs/{name}/report.md": f"docs/{name}/scores" for name in ("report", "ablations")}
MEASURED = sorted((ROOT / "docs" / "measured").glob("*.csv"))
BARE = re.compile(r"(?<![\d.])-?\.\d{2,3}(?!\d)(?: \[-?\.\d{3}, -?\.\d{3}\])?")  # with its interval, if there is one
QUANTITY = re.compile(r"(?<![\w.,])(?:\d[\d,]*)?\.?\d+ (?:ms|s|min|minutes|[kMGT]B|GiB)\b")
CHOSEN = {  # what somebody set, and nobody measured: limits, lambdas, chances
    *("8 GB", "5 GB", "5 MB", "1 MB", "1 GB", "8 minutes", "10 minutes", "80 GB", ".1 s", "5 s"),
    *(".95", ".25"),
}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@by_page
def test_tables_hold_what_is_stored_and_others_no_figures(page: Path) -> None:
    text = page.read_text()
    assert filled(text, page.parent) == text, "python -m docs.results fills them"
    for block in BLOCK.finditer(text):
        other = re.sub(r"\d", "7", block[0].removeprefix(block["mark"]))
        assert filled(text.replace(block[0], block["mark"] + other), page.parent) == text
    cells = [
        cell.strip()
        for line in BLOCK.sub("", text).splitlines()
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
    ]
    assert [cell for cell in cells if re.match(r"\W*(\d*\.\d|[\d,]+( \w+)?$)", cell)] == []


def test_the_page_of_commands_has_all_of_them() -> None:
    assert commands_page.PAGE.read_text() == commands_page.page(), "python -m docs.commands writes it"


@by_page
def test_figures_in_sentences_are_stored(page: Path) -> None:
    prose = _plain(re.sub(r"```.*?```|^\|.*?$", "", BLOCK.sub("", page.read_text()), flags=re.DOTALL | re.MULTILINE))
    reports = _plain("".join(map(Path.read_text, sorted((ROOT / "docs").glob("*/report.md")))))
    measured = _plain(" ".join(cell for file in MEASURED for row in stored(file) for cell in row.values()))
    minutes = {f"{figure} minutes" for figure in re.findall(r"\| (\d+\.\d) \|", reports)}  # of a training, per seed
    known = {*QUANTITY.findall(measured), *minutes, *BARE.findall(reports + measured)}
    known |= {*re.findall(r"-?\.\d{2,3}", measured), *(each.split()[0] for each in known if "[" in each), *CHOSEN}
    assert [each for each in (*QUANTITY.findall(prose), *BARE.findall(prose)) if each not in known] == []


def _plain(text: str) -> str:
    """Without code and signs, on one line, a half as .5."""
    return re.sub(r"\b0(?=\.\d)|\+", "", " ".join(re.sub(r"`[^`]*`", "", text).split()))


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_what_was_measured_says_how_when_and_on_what(file: Path) -> None:
    for row in stored(file):
        assert tuple(row)[-3:] == ORIGIN
        assert row["command"].startswith(("python -m benchmarks.", "agent-r1 ", "by hand: "))
        assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", row["date"])
        assert row["machine"]


@pytest.mark.parametrize("page", SCORES)
def test_reports_say_what_the_scores_in_git_say(page: str) -> None:
    rows = [line.split("|")[1:3] for line in table((ROOT / page).read_text(), "Exact match").splitlines()[2:]]
    shown = {name.strip(" `"): score.split()[0] for name, score in rows}
    stored = {path.stem: json.loads(path.read_text()) for path in (ROOT / SCORES[page]).glob("*.json")}
    assert shown == {name: f"{scores['success']:.3f}" for name, scores in stored.items()}


def test_readme_is_short_and_quotes_the_loop() -> None:
    [quoted] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    whole = textwrap.dedent(inspect.getsource(loop.iterate).partition("    while ")[2].join(("    while ", "")))
    assert quoted == whole
    assert README.count("\n") <= 150


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    text = _unfenced(page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = page.parent / name if name else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", _unfenced(file.read_text()).lower(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, target


@by_page
def test_commands_targets_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"(?:`|^|&& )make ([a-z]+)", text, re.MULTILINE)} - {*targets} == set()
    group: Any = get_command(commands.app)
    assert {*re.findall(r"agent-r1 ([a-z][a-z-]+)", text)} - {*group.commands} == set()
    files = re.findall(r"`((?:agent_r1|flows|tests|benchmarks|overlays)/[\w./-]*[\w/])`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    modules = re.findall(
        r"\b((?:agent_r1|benchmarks|docs)(?:\.[a-z]\w*)+)\b", text.replace("agent_r1.policy.registered", "an event")
    )
    assert [module for module in modules if not _is_there(module)] == []


def _is_there(module: str) -> bool:
    """Whether a dotted name is a module, or stands in one."""
    parts = module.split(".")
    for size in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[:size])
        if path.is_dir() and size == len(parts):
            return True
        if file := next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None):
            return all(re.search(rf"\b{name}\b", file.read_text()) for name in parts[size:])
    return False


@by_page
def test_keys_exist(page: Path) -> None:
    """Every key of params.yaml that a sentence names."""
    known = load(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
    sections = "|".join(known)
    named = re.findall(rf"`((?:{sections})(?:\.[a-z_0-9]+)+)(?:: [^`]*)?`", _unfenced(page.read_text()))
    open_ended = ("runs.", "ablations.", "search.py", "env.py", "train.py", "prepare.py")
    missing = [key for key in named if not key.startswith(open_ended) and not _has(known, key.split("."))]
    assert missing == []


def _has(values: Any, names: list[str]) -> bool:
    """Whether nested mappings hold a key; below a key without a value every name is one."""
    return (
        not names
        or values is None
        or (isinstance(values, dict) and names[0] in values and _has(values[names[0]], names[1:]))
    )


def fenced() -> Iterator[Any]:
    for page in PAGES:
        for number, (language, code) in enumerate(
            re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        ):
            yield pytest.param(language, code, id=f"{page.stem}-{language}-{number}")


@pytest.mark.parametrize(("language", "code"), list(fenced()))
def test_code_is_valid(language: str, code: str) -> None:
    if language == "python":
        compile(
            "def page():\n" + textwrap.indent(code, "    "), "a page", "exec"
        )  # README quotes the body of a function
    elif language == "yaml":
        shipped = load(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
        validated(
            Params,
            override(shipped, yaml.safe_load(code.replace("estimator: group_median", "estimator: grpo"))),
            "a page",
        )
    elif language == "json":
        json.loads(code)
    elif language == "mermaid":
        stages = {*yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]}
        assert {*re.findall(r"\w+", code.partition("\n")[2])} == stages
    else:
        assert language == "bash"
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


def test_hostile_inputs_are_counted() -> None:
    tried = f"{sum(kind.tried for kind in KINDS):,} "
    for file in ("Makefile", "docs/results.md", "docs/security.md"):
        assert re.findall(r"([\d,]+ )(?:seeded |hostile )+inputs", (ROOT / file).read_text()) == [tried], file


def _unfenced(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
