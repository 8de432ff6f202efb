"""Extraction of the prose in a file; every character keeps its position.

The prose in a Python file is its docstrings, comments, strings of at least three words, and names
of tests. Code becomes `BARRIER`, across which no pattern matches. Code inside prose, such as `names
in backticks`, becomes `CODE`.
"""

import io
import re
import tokenize
from pathlib import Path

BARRIER = "¦"
CODE = "x"

_TEXT_COMMENTS = re.compile(r"(?:^|(?<=\s))#(?!!)[^\n]*|\{\{-?\s*/\*.*?\*/", re.M | re.S)
_QUOTED = re.compile(r'"[^"\n]*"')
_STRING = re.compile(r"(?s)([a-zA-Z]*)('''|\"\"\"|'|\")(.*)\2$")
_TEST_NAME = re.compile(r"\bdef (test_\w+)")
_ARGUMENT = re.compile(r"(?m)^(\s+)(\w+)(?=: )")
_FEW_WORDS = 3


def prose_of(path: Path) -> str:
    """Return the prose in a file, as a text of the same length with the same positions."""
    text = path.read_text()
    if path.suffix == ".py":
        return _without_code(_of_python(text))
    if path.suffix in (".md", ".txt"):
        return _without_code(_of_markdown(text))
    return _without_code(_of_comments(text))


def _of_python(text: str) -> str:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    kept = _hidden(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        at = starts[token.start[0] - 1] + token.start[1]
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:)", token.string):
            kept[at : at + len(token.string)] = " " + token.string[1:]
        elif token.type == tokenize.STRING:
            prose = _of_string(token.string)
            kept[at : at + len(prose)] = prose
    for found in _TEST_NAME.finditer(text):
        kept[found.start(1) : found.end(1)] = found[1].replace("_", " ")
    return "".join(kept)


def _of_string(literal: str) -> str:
    """Return the words of a string literal. Quotes become spaces, so that adjacent strings join."""
    match = _STRING.match(literal)
    assert match is not None, literal
    prefix, quotes, body = match.groups()
    if len(body.split()) < _FEW_WORDS and not body.endswith(" ") and not body.startswith(" "):
        return BARRIER * len(literal)
    if "f" in prefix.lower():
        body = re.sub(r"\{[^{}]*\}", lambda found: CODE * len(found[0]), body)
    if len(quotes) == 3:
        body = _ARGUMENT.sub(lambda found: found[1] + CODE * len(found[2]), body)
    if "r" not in prefix.lower():
        body = body.replace("\\n", "  ")
    return " " * len(prefix + quotes) + body + " " * len(quotes)


def _of_markdown(text: str) -> str:
    for code in (r"^(```|~~~).*?^\1", r"(?<=\n\n)(?: {4}[^\n]*\n|\n)+", r"^---$.*?^---$"):
        text = re.sub(code, lambda found: "".join(_hidden(found[0])), text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", _blank, text)
    text = re.sub(r"!?\[", _blank, text)
    return re.sub(r"^(#.*|\s*[-*] |\s*\d+\. |\|.*)", _ended, text, flags=re.M)


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


def _ended(found: re.Match[str]) -> str:
    """Return a heading, list mark or table row with marks that end the sentence before it."""
    return re.sub(r"[|#*-]|\d+\.", lambda mark: BARRIER * len(mark[0]), found[0])


def _of_comments(text: str) -> str:
    kept = _hidden(text)
    for found in (*_QUOTED.finditer(text), *_TEXT_COMMENTS.finditer(text)):
        if len(found[0].split()) >= _FEW_WORDS:
            kept[found.start() : found.end()] = found[0].replace("#", " ", 1)
    return "".join(kept)


def _hidden(text: str) -> list[str]:
    return [char if char.isspace() else BARRIER for char in text]


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", lambda found: CODE * len(found[0]), text)
