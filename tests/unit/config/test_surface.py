"""The public interface of the settings: keys, documentation and examples."""

import re
from pathlib import Path

from pipeline.config.docs import render
from pipeline.config.keys import setting_keys
from pipeline.config.reading.load import load_config
from tests.paths import ROOT

FROZEN = Path(__file__).parent / "keys.txt"


def test_keys_are_frozen():
    """Adding or removing a key is a decision; update tests/unit/config/keys.txt accordingly."""
    assert [key.name for key in setting_keys()] == FROZEN.read_text().split()


def test_messages_show_true_and_null_in_one_spelling():
    """`pipeline.errors.shown` writes `True` and `null`; fixed texts must use the same spelling."""
    texts = {path: path.read_text() for path in (ROOT / "pipeline/config").rglob("*.py")}
    other = re.compile(r"found (true|false|None)\b")
    assert [path.name for path, text in texts.items() if other.search(text)] == []


def test_every_key_is_described():
    assert [key.name for key in setting_keys() if not key.field.description] == []


def test_documentation_is_up_to_date():
    assert (ROOT / "docs/config.md").read_text() == render(), "run `make docs`"


def test_examples_load_without_notes():
    """Every settings file in examples/ loads, and all its settings have an effect."""
    for path in sorted(ROOT.glob("examples/*.yaml")):
        assert load_config(path).notes == (), path.name
