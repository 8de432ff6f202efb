"""Two-digit addition: the problems, their split, and the text of an answer.

    user        37+58=?
    assistant   7+8=15 3+5+1=9 95

The response adds the ones, adds the tens and the carry, and ends with the sum.
"""

import random
from dataclasses import dataclass

DATA_SOURCE = "retrace/addition"
WARM_UP, TRAIN, VAL = "warm_up", "train", "val"
SIZES = {WARM_UP: 4000, TRAIN: 3072, VAL: 128}
SPLIT_SEED = 20


@dataclass(frozen=True)
class Problem:
    """An addition of two numbers from 10 to 99."""

    a: int
    b: int

    @property
    def question(self) -> str:
        """The user's message. Example: "37+58=?"."""
        return f"{self.a}+{self.b}=?"

    @property
    def answer(self) -> str:
        """The exact sum. Example: "95"."""
        return str(self.a + self.b)


@dataclass(frozen=True)
class Slips:
    """The slips of a careless pupil: sums off by one, and a forgotten or invented carry."""

    ones: int = 0
    carry: int = 0
    tens: int = 0


NO_SLIPS = Slips()


def worked_answer(problem: Problem, slips: Slips = NO_SLIPS) -> str:
    """Return the full response, such as "7+8=15 3+5+1=9 95".

    Results after a slip are computed from the wrong result.
    """
    ones_a, ones_b = problem.a % 10, problem.b % 10
    tens_a, tens_b = problem.a // 10, problem.b // 10
    ones = abs(ones_a + ones_b + slips.ones)
    carry = abs(ones // 10 - slips.carry)
    tens = tens_a + tens_b + carry + slips.tens
    return f"{ones_a}+{ones_b}={ones} {tens_a}+{tens_b}+{carry}={tens} {tens}{ones % 10}"


def draw_slips(rng: random.Random, rate: float) -> Slips:
    """Draw slips: each of the three results is wrong with probability `rate`, independently."""

    def off_by_one() -> int:
        return rng.choice((-1, 1)) if rng.random() < rate else 0

    return Slips(ones=off_by_one(), carry=abs(off_by_one()), tens=off_by_one())


def split() -> dict[str, list[Problem]]:
    """Return disjoint parts of all 8,100 problems, shuffled with a fixed seed.

    The part `warm_up` is the training data of the model in `model/`, `train` contains the prompts
    of the quickstart, and `val` contains the validation prompts. The remaining 900 problems are
    unused.
    """
    problems = [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(problems)
    parts, start = {}, 0
    for name, size in SIZES.items():
        parts[name] = problems[start : start + size]
        start += size
    return parts
