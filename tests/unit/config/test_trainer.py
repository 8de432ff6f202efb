"""A run may have any name, from which Retrace derives a valid name for the run's folder."""

import pytest

from pipeline.config.trainer import folder_name
from tests.unit.config.settings import load, notes


@pytest.mark.parametrize("name", ["a", "dsv3-32nodes", "0" * 40])
def test_a_valid_folder_name_is_kept(name):
    assert folder_name(name) == name


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("deepseek_llm_7b_math_megatron", "deepseek-llm-7b-math-megatron-e5e963ea"),
        ("Qwen3.5 (a/b)", "qwen3-5-a-b-"),
        ("x" * 41, "x" * 31 + "-"),
        ("a" * 30 + "_b", "a" * 30 + "-"),
        ("_", "run-"),
        ("-a", "a-"),
    ],
)
def test_other_names_are_shortened_and_stay_distinct(name, folder):
    """The digest distinguishes names that differ only in characters not allowed in folder names."""
    derived = folder_name(name)
    assert derived.startswith(folder)
    assert len(derived) <= 40
    assert folder_name(derived) == derived, "the derived name is not valid"
    assert folder_name(name + "_") != derived


def test_a_note_names_the_folder(tmp_path):
    written = "trainer.experiment_name=Qwen3_30B"
    config = load(tmp_path, written).config
    assert config.run_uri == f"outputs/store/{config.trainer.run_name}"
    assert notes(tmp_path, written) == [
        f"trainer.experiment_name: the folder of the run 'Qwen3_30B' is {config.trainer.run_name}"
    ]
