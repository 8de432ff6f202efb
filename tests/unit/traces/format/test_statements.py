"""Every statement in docs/trace-format.md has a test that breaks it."""

import re
from functools import cache

import pytest

from pipeline.store import StoreError
from pipeline.traces import TraceError, read_manifest, read_routes, read_samples
from pipeline.upkeep.verify import verify
from tests.forging import Forgery
from tests.memory_store import MemoryStore
from tests.paths import ROOT
from tests.samples import make_samples, sealed_r3
from tests.unit.traces.format.page import PAGE, plain, statements, strange_sections
from tests.unit.traces.format.statements import CASES, ELSEWHERE, FREE, READING


@cache
def step() -> MemoryStore:
    store = MemoryStore()
    sealed_r3(store, make_samples(known=0.8))
    return store


def read_all(store: MemoryStore) -> None:
    manifest = read_manifest(store, 0)
    read_samples(store, manifest, manifest.ids)
    read_routes(store, manifest, manifest.ids)


def test_the_unchanged_step_is_correct():
    assert not verify(Forgery(step()).sealed()).problems


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.quote[:40]} {case.says[:30]}")
def test_verify_reports_a_broken_statement(case):
    forgery = Forgery(step())
    case.forge(forgery)
    problems = [str(problem) for problem in verify(forgery.sealed()).problems]
    assert any(re.search(case.says, problem) for problem in problems), problems


@pytest.mark.parametrize("case", READING, ids=lambda case: case.quote)
def test_a_reader_refuses_a_broken_statement(case):
    forgery = Forgery(step())
    case.forge(forgery)
    store = forgery.sealed()
    with pytest.raises((TraceError, StoreError), match=case.says):
        read_all(store)


QUOTES = [*(case.quote for case in CASES), *ELSEWHERE, *FREE]


def test_each_quote_is_on_the_page():
    """If a statement changes, its case must change too."""
    assert [quote for quote in QUOTES if plain(quote) not in plain(PAGE)] == []


def test_each_statement_has_a_case():
    """statements.py quotes each table row and rule, so that each one has a test."""
    quotes = [plain(quote) for quote in QUOTES]
    bare = [
        f"{section}: {text}"
        for section, text in statements()
        if not any(quote in text or text in quote for quote in quotes)
    ]
    assert bare == [], "add a case, or give the reason in ELSEWHERE or FREE"
    assert strange_sections() == set()


def test_the_files_of_tests_elsewhere_exist():
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []
