"""The style: patterns of phrases that make readers stumble, as checks that proselint can run.

Each pattern once occurred many times in this project's texts. If reviews repeatedly find another
phrase, add a pattern for it.
"""

import re
from collections.abc import Iterator

from proselint.registry.checks import Check, CheckFlags, CheckResult
from proselint.registry.checks.engine import Fancy
from proselint.registry.checks.types import ExistenceSimple

from scripts.prose.text import BARRIER

WORDS_OF_A_PAGE = 25
"""Maximum number of words in a sentence of a page."""
WORDS_OF_CODE = 40
"""Maximum number of words in a sentence of a docstring, comment or message."""

OF_PROSELINT = (
    "archaism",
    "hedging",
    "malapropisms",
    "needless_variants",
    "nonwords",
    "redundancy",
)
"""Proselint's checks that suit technical text; many of its other checks mistake code for prose."""

_PARTICIPLE = (
    r"(?:\w+(?:ed|en|wn|un|pt|lt|nt|ft|st|ught|ound|et|ld|id|ut|it)"
    r"|yet|to|become|come|gone|done|made|read)\b"
)
_COMPARED = r"(?:longer|more|less|fewer|worse|better|larger|smaller|different|older|newer)"

PATTERNS: dict[str, tuple[str, str]] = {
    "main_verb_have": (
        rf"\b(?:has|have|had)\s+not\b(?!\s+{_PARTICIPLE})(?!\s+\w+ly\s)",
        "write 'does not have' or 'lacks'",
    ),
    "need_not": (
        r"\bneeds?\s+(?:it|them|this|that|these|those|any|one)?\s*not\b(?!\s+\w)",
        "write 'does not need'",
    ),
    "is_no": (
        rf"(?<!there )(?<!there\n)\b(?:is|are|was|were)\s+no\s+(?!{_COMPARED})\w+",
        "write 'is not a', 'has no' or 'does not'",
    ),
    "is_none": (r"(?<!there )\b(?:is|are|was|were)\s+(?-i:none)\b", "say what it is not"),
    "speaking_code": (
        r"\b(?:says|tells|wants|told|wanted|knows\s+(?:how|what|which|of))\b",
        "code and settings do not speak or want: 'contains', 'names', 'reports', 'requires'",
    ),
    "people": (
        r"\b(?:nobody|anybody|somebody|everybody|whoever)\b",
        "name the component or the user",
    ),
    "who": (
        r"\bwho\s+(?:asks|wants|reads|calls|needs|loads|writes|makes|waits|takes|holds|uses|comes|has)\b",
        "name the component or the user",
    ),
    "is_there": (
        r"\b(?:is|are|was|were)\s+there\b(?!\s+(?:a|an|any|no|is|are)\b)",
        "write 'exists', 'is present' or 'is available'",
    ),
    "of_its_own": (
        r"\bof\s+(?:its|their|your|our)\s+own\b"
        r"(?!\s+(?!that|which|and|or|in|for|with|to|from|by|of|at|on|is|are|where|below)\w)",
        "write 'its own' before the noun",
    ),
    "old_words": (
        r"\b(?:thereof|therein|whereby|hence|anew|whilst|amongst|in vain|mended?|mending|alike"
        r"|nought|lest)\b",
        "use a common word",
    ),
    "what_else": (r"\bwhat\s+else\b|\bor\s+what\b", "write 'anything else' or name it"),
    "goes_on": (r"\b(?:goes|go|went|going|gone)\s+on\b", "write 'continues'"),
    "stands": (r"\b(?:stands|stood)\s+(?:in|there|at|on|for\s+itself)\b", "write 'is'"),
    "lies": (r"\b(?:lies|lie|lay)\s+(?:in|there|at|on|beside|under|back)\b", "write 'is'"),
    "beside": (r"\bbeside\b", "write 'next to', 'with' or 'in addition to'"),
    "without_a_word": (r"\bwithout\s+(?:a|one)\s+word\b", "write 'silently'"),
    "difference_to": (
        r"\bdifferences?\s+to\b(?!\s+(?:the\s+)?(?:versions?|files?)\s+in\b)",
        "write 'from'",
    ),
    "letters": (r"\bLetters:\s", "write 'Dimensions: T is ...'"),
    "some_minutes": (
        r"\b(?:in|after|within|for)\s+some\s+(?:seconds|minutes|hours|time)\b",
        "write 'a few'",
    ),
    "trains_by": (r"\btrain(?:s|ed)?\s+by\s+(?:PPO|GRPO|GSPO|TIS)\b", "write 'with'"),
    "for_want_of": (r"\bfor\s+want\s+of\b", "write 'because ... is missing'"),
    "at_work": (r"\b(?:is|are|was|were)\s+at\s+work\b", "write 'is running' or 'in progress'"),
    "still": (r"\b(?:stands?|stood|standing)\s+still\b", "write 'waits' or 'pauses'"),
    "apart": (r"\b(?:tells?|told|telling)\s+apart\b", "write 'distinguish'"),
    "hand_over": (r"\bhand(?:s|ed|ing)?\s+over\b", "write 'passes'"),
    "room": (r"\b(?:room|rooms)\s+(?:of|for|that|which)\b|\ball\s+rooms\b", "write 'package'"),
    "twice": (
        r"\b(the|a|an|of|to|in|is|are|and|or|for|with|that|it|not)\s+\1\b",
        "remove the repeated word",
    ),
    "one_after_the_other": (
        r"\bone\s+after\s+the\s+other\b",
        "write 'one at a time' or 'in order'",
    ),
    "none_without": (r"\bNone\s+without\b", "write 'None if there is no ...'"),
    "for_errors": (r"\bfor\s+errors?(?=[.;,)])", "write 'for error messages'"),
    "problems_of": (
        r"\bproblems?\s+of\s+(?:the|a|an|its|their|prompt|run)s?\b",
        "write 'problems with'",
    ),
    "fit_into": (r"\bfits?\s+into\s+(?:a\s+)?GPUs?\b", "write 'fit on'"),
    "as_it_is": (
        r"\bas\s+(?:it\s+(?:is|stands|lies)|they\s+(?:are|stand|lie))\b(?!\s+\w+(?:ed|en|wn)\b)",
        "write 'unchanged' or 'verbatim'",
    ),
}


def our_checks(words: int) -> list[Check]:
    """Return the style's checks; `words` is the maximum number of words in a sentence."""
    found = [
        Check(
            ExistenceSimple(pattern),
            Fancy(),
            f"retrace.{name}",
            f"'{{}}': {advice}",
            CheckFlags(allow_quotes=True),
        )
        for name, (pattern, advice) in PATTERNS.items()
    ]
    sentences = Check(
        lambda text, check: _long_sentences(text, check, words),
        Fancy(),
        "retrace.sentence",
        f"more than {words} words in a sentence: '{{}}'",
        CheckFlags(allow_quotes=True),
    )
    return [*found, sentences]


_SENTENCE_END = re.compile(rf"[.!?:;][\"')*]*(?=\s)|{BARRIER}|\n\s*\n")
_WORD = re.compile(r"(?<!\S)[^\s_=]*[^\W_][^\s_=]*(?!\S)")
"""Names with underscores and settings with `=` are code."""


def _long_sentences(text: str, check: Check, words: int) -> Iterator[CheckResult]:
    start = 0
    for end in (*(found.end() for found in _SENTENCE_END.finditer(text)), len(text)):
        sentence = _WORD.findall(text[start:end])
        if len(sentence) > words:
            first = start + len(text[start:end]) - len(text[start:end].lstrip())
            message = check.message.format(" ".join(sentence[:8]) + " ...")
            yield CheckResult(check.path, message, (first, end), None)
        start = end
