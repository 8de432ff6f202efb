"""The public surface: keys, documentation and examples."""

from pathlib import Path

from pipeline.config.docs import render
from pipeline.config.keys import setting_keys
from pipeline.config.reading.load import load_config
from tests.paths import ROOT

FROZEN = Path(__file__).parent / "keys.txt"


def test_keys_are_frozen():
    """A new key, or one less, is a decision: write it into tests/unit/config/keys.txt too."""
    assert [key.name for key in setting_keys()] == FROZEN.read_text().split()


def test_every_key_is_described():
    assert [key.name for key in setting_keys() if not key.field.description] == []


def test_documentation_is_up_to_date():
    assert (ROOT / "docs/config.md").read_text() == render(), "run `make docs`"


def test_examples_load():
    """Every settings file in examples/, and nothing in it without effect."""
    for path in sorted(ROOT.glob("examples/*.yaml")):
        assert load_config(path).notes == (), path.name
