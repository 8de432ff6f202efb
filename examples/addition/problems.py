"""Two-digit addition: which problems exist, who may see which, and the text of an answer.

    user        37+58=?
    assistant   7+8=15 3+5+1=9 95

The response adds the ones, then the tens with the carry, then states the sum.
"""

import random
from dataclasses import dataclass

DATA_SOURCE = "retrace/addition"
WARM_UP, TRAIN, VAL = "warm_up", "train", "val"
SIZES = {WARM_UP: 4000, TRAIN: 3072, VAL: 128}
SPLIT_SEED = 20


@dataclass(frozen=True)
class Problem:
    """One addition of two numbers from 10 to 99."""

    a: int
    b: int

    @property
    def question(self) -> str:
        """The user's message, "37+58=?"."""
        return f"{self.a}+{self.b}=?"

    @property
    def answer(self) -> str:
        """The exact sum, "95"."""
        return str(self.a + self.b)


@dataclass(frozen=True)
class Slips:
    """What a careless pupil gets wrong: sums off by one, a carry forgotten or invented."""

    ones: int = 0
    carry: int = 0
    tens: int = 0


NO_SLIPS = Slips()


def worked_answer(problem: Problem, slips: Slips = NO_SLIPS) -> str:
    """The full response, "7+8=15 3+5+1=9 95"; whatever follows a slip is consistent with it."""
    ones_a, ones_b = problem.a % 10, problem.b % 10
    tens_a, tens_b = problem.a // 10, problem.b // 10
    ones = abs(ones_a + ones_b + slips.ones)
    carry = abs(ones // 10 - slips.carry)
    tens = tens_a + tens_b + carry + slips.tens
    return f"{ones_a}+{ones_b}={ones} {tens_a}+{tens_b}+{carry}={tens} {tens}{ones % 10}"


def draw_slips(rng: random.Random, rate: float) -> Slips:
    """Each of the three results is wrong with probability `rate`, whatever the others are."""

    def off_by_one() -> int:
        return rng.choice((-1, 1)) if rng.random() < rate else 0

    return Slips(ones=off_by_one(), carry=abs(off_by_one()), tens=off_by_one())


def split() -> dict[str, list[Problem]]:
    """All 8,100 problems, shuffled with a fixed seed and cut into disjoint parts.

    warm_up: supervised training of the committed model. train: prompts of the GRPO run. val:
    validation prompts. The remaining 900 are left alone.
    """
    problems = [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(problems)
    parts, start = {}, 0
    for name, size in SIZES.items():
        parts[name] = problems[start : start + size]
        start += size
    return parts
