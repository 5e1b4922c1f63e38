"""The world: names differ, facts link up, and every fact can be read in its entity's passage."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent_r1.answers import contains
from agent_r1.data.atlas import World, build_world, tell
from agent_r1.data.questions import look_up
from agent_r1.params.prepare import AtlasParams, PrepareParams
from agent_r1.records import Passage
from agent_r1.search.base import Search
from tests.cases import tables

KINDS = tables(Path(__file__).parent)["links"]
LEAVES = {"birth year", "release year", "founding year", "currency", "language"}


def test_sizes_and_links(atlas: World, atlas_params: AtlasParams) -> None:
    sizes = {kind: [*atlas.kinds.values()].count(kind) for kind in KINDS}
    assert sizes == {"person": 61, "film": 30, "company": 12, "city": 10, "country": 4}
    for entity, facts in atlas.facts.items():
        for relation, value in facts.items():
            linked = KINDS[atlas.kinds[entity]].get(relation)
            assert atlas.kinds.get(value) == linked if linked else relation in LEAVES
        if atlas.kinds[entity] == "country":
            assert atlas.facts[facts["capital"]]["country"] == entity
    spouses = {name: atlas.facts[name].get("spouse") for name, kind in atlas.kinds.items() if kind == "person"}
    assert [*spouses.values()].count(None) == 1, "the odd one is single"
    assert all(spouses[to] == name != to for name, to in spouses.items() if to)


def test_a_passage_tells_every_fact_of_its_entity_briefly(atlas: World) -> None:
    passages = tell(atlas, seed=3)
    assert [passage.title for passage in passages] == list(atlas.facts)
    assert len({passage.passage_id for passage in passages}) == len(passages)
    for passage in passages:
        assert len(passage.text.split()) <= 45
        assert all(contains(passage.text, [value]) for value in atlas.facts[passage.title].values()), passage
        assert "{" not in passage.text
        for value in atlas.facts[passage.title].values():
            # Then a byte-level tokenizer writes it as in a question, and copying it is copying tokens.
            assert not re.search(rf"(^|[^ ])\b{value}\b", passage.text)


def test_hops_are_searchable(prepare_params: PrepareParams, bm25_index: Callable[[Sequence[Passage]], Search]) -> None:
    """BM25, top 2, over the default world: at least 99 % of all correct queries."""
    default = build_world(prepare_params.atlas, prepare_params.seed)
    index = bm25_index(tell(default, prepare_params.seed))
    hops = [look_up(default.facts, entity, relation) for entity, facts in default.facts.items() for relation in facts]
    found = index.search([hop.query for hop in hops], k=2)
    seen = [hop.entity in [passage.title for passage in result] for hop, result in zip(hops, found, strict=True)]
    assert sum(seen) >= 0.99 * len(seen)


def test_a_world_that_cannot_be_is_refused(atlas_params: AtlasParams) -> None:
    with pytest.raises(ValueError, match="cities 10 cannot give 11 countries a capital each; raise cities to 11"):
        build_world(atlas_params.model_copy(update={"countries": 11}), 0)
