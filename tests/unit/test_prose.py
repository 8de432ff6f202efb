"""The prose check: the text that it reads, and the patterns that it refuses."""

from pathlib import Path

import pytest

from scripts.prose.style import PATTERNS, our_checks
from scripts.prose.text import BARRIER, CODE, prose_of

REFUSED = {
    "main_verb_have": "prompt 17, which this run has not",
    "need_not": "files need it not",
    "is_no": "the value is no number",
    "is_none": "a version that is none",
    "speaking_code": "the setting says which it is",
    "people": "nobody reads it",
    "who": "one that who wants it loads",
    "is_there": "once the manifest is there, it returns",
    "of_its_own": "a process of its own",
    "old_words": "the page is made anew",
    "what_else": "flows, launch or what belongs to them",
    "goes_on": "the run goes on",
    "stands": "it stands in the manifest",
    "lies": "it lies beside the run",
    "beside": "a file beside it",
    "without_a_word": "it returns without a word",
    "difference_to": "a difference to the previous version",
    "letters": "Letters: T tokens",
    "some_minutes": "it ends after some minutes",
    "trains_by": "the arm trains by GRPO",
    "for_want_of": "it fails for want of memory",
    "at_work": "while the run is at work",
    "still": "the engine stands still",
    "apart": "the router told apart two experts",
    "hand_over": "it hands over the bytes",
    "room": "a room for policies",
    "twice": "the policy of the the run",
    "one_after_the_other": "files are read one after the other",
    "none_without": "None without a critic.",
    "for_errors": "the name, for errors.",
    "problems_of": "it yields the problems of a run",
    "fit_into": "layouts that do not fit into GPUs",
    "as_it_is": "the file is copied as it is",
}
ACCEPTED = (
    "The worker has not finished, and it has not yet started. There is no manifest. "
    "The value is no longer a number. Is there a manifest? The run continues without it."
)


def found(text: str, words: int = 40) -> set[str]:
    return {
        result.check_path.removeprefix("retrace.")
        for check in our_checks(words)
        for result in check.check_with_flags(f"\n{text}\n")
    }


def test_each_pattern_has_an_example():
    assert REFUSED.keys() == PATTERNS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_an_example_is_refused(name: str):
    assert name in found(REFUSED[name])
    assert name in found(REFUSED[name].replace(" ", "\n    "))


def test_plain_sentences_are_accepted():
    assert found(ACCEPTED) == set()


@pytest.mark.parametrize(("words", "refused"), [(25, set()), (26, {"sentence"})])
def test_a_sentence_has_a_maximum_number_of_words(words: int, refused: set[str]):
    assert found("A short one. " + "word " * words + "\n\nAnother paragraph.", 25) == refused


def prose(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    made = prose_of(path)
    assert len(made) == len(text)
    assert [at for at, char in enumerate(made) if char == "\n"] == [
        at for at, char in enumerate(text) if char == "\n"
    ]
    return made


def test_prose_of_python_keeps_its_place(tmp_path: Path):
    text = '''"""The module's docstring."""
import os  # a reason for it
def test_a_name_of_a_test():
    raise ValueError(f"the value {os.sep!r} of `key` " "is no number", 'short')
'''
    made = prose(tmp_path, "code.py", text)
    for words in ("The module's docstring.", "a reason for it"):
        assert made.index(words) == text.index(words)
    assert "test a name of a test" in made
    assert f"the value {CODE * 10} of {CODE * 5}    is no number" in made
    assert "import" not in made
    assert "short" not in made


def test_names_of_arguments_are_code(tmp_path: Path):
    text = 'def f(wanted):\n    """Return it.\n\n    Args:\n        wanted: The keys.\n    """\n'
    made = prose(tmp_path, "code.py", text)
    assert f"{CODE * 6}: The keys." in made


def test_no_pattern_matches_across_code(tmp_path: Path):
    made = prose(tmp_path, "code.py", 'pair = ("what this is", "no number of it")\n')
    assert BARRIER in made
    assert found(made) == set()


def test_prose_of_a_page_excludes_code(tmp_path: Path):
    text = "# Title\n\nA [link](docs/is-no-page.md) to `code`.\n\n    nobody\n\n```\nnobody\n```\n"
    made = prose(tmp_path, "page.md", text)
    assert "nobody" not in made
    assert "no-page" not in made
    assert " link" in made


def test_prose_of_other_files_consists_of_comments_and_messages(tmp_path: Path):
    text = 'key: value that is no prose # a comment here\nfail "nobody set the value"\n'
    made = prose(tmp_path, "values.yaml", text)
    assert "that is no prose" not in made
    assert "a comment here" in made
    assert "nobody set the value" in made
