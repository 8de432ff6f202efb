"""Users' code before engines start: it is loaded, and a reward function is tried on a few prompts.

Each prompt is scored with its ground truth as the response, and with an empty response.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pipeline.rl.rewards import RewardError, at_sample
from pipeline.scoring.code import RewardCode, unpacked
from pipeline.scoring.process import AbsentError, EndedError, RewardProcess

COLUMNS = ("data_source", "ground_truth", "extra_info")
"""The columns of the staged prompts that a trial reads, besides prompt_id."""
_PROMPTS = 4
_DEFAULT_S = 60.0
"""The time limit in seconds if the settings have none."""
LOAD_S = 120.0
"""The time limit in seconds of `try_load`: a file that imports torch from a slow disk needs one."""


@dataclass(frozen=True)
class Question:
    """A prompt's arguments for the reward function. Example: Question(17, 'add', '95', {})."""

    row: int
    """The prompt's row in the staged table."""
    data_source: str
    ground_truth: Any
    extra_info: Any

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the question of a row of the staged table, read with COLUMNS."""
        extra_info = row["extra_info"]
        return cls(
            row=row["prompt_id"],
            data_source=row["data_source"],
            ground_truth=json.loads(row["ground_truth"]),
            extra_info={} if extra_info is None else json.loads(extra_info),
        )


def tried_rows(count: int) -> list[int]:
    """Return the rows of `count` prompts that a trial uses, spread evenly over all rows."""
    return sorted({count * index // _PROMPTS for index in range(_PROMPTS)}) if count else []


def try_load(code: RewardCode, setting: str | None = None) -> str | None:
    """Load users' code as the workers do, in a separate process without credentials.

    Args:
        code: The code to load.
        setting: The setting that names an estimator or a loss; None for a reward file.

    Returns:
        What is missing here if the workers may be able to load the code; None if it was loaded.

    Raises:
        RewardError: The code cannot be loaded, lacks the function, or takes longer than LOAD_S.
    """
    with unpacked(code.content) as path:
        process = RewardProcess(code, path, LOAD_S, "the limit of this check", setting)
        try:
            process.start()
        except AbsentError as error:
            return str(error)
        finally:
            process.end()
    return None


def try_reward(
    code: RewardCode,
    questions: Sequence[Question],
    timeout_s: float | None,
    start_timeout_s: float,
) -> str | None:
    """Call a reward function on a few inputs, in a reward process.

    The trial ends early if it takes longer than the limit for one call, but not before two calls.

    Args:
        code: The code to run.
        questions: The prompts to score.
        timeout_s: The limit for a call in seconds; None for the default limit of a trial.
        start_timeout_s: Seconds that the process may take to load the code.

    Returns:
        A note if the function fails on some inputs; None if it fails on none.

    Raises:
        RewardError: The code cannot be loaded, or the function fails on all inputs.
    """
    limit_s = timeout_s or _DEFAULT_S
    ends = time.monotonic() + limit_s
    calls, errors = 0, []
    with unpacked(code.content) as path:
        process = RewardProcess(code, path, start_timeout_s)
        try:
            process.start()
            for question in questions:
                for empty in (False, True):
                    if calls >= 2 and time.monotonic() > ends:
                        break
                    calls += 1
                    errors += _errors(process, question, empty, limit_s)
        finally:
            process.end()
    if not errors:
        return None
    found = (
        f"the reward function failed on {len(errors)} of {calls} trial inputs (empty responses, "
        f"and ground truths as responses): {errors[-1]}"
    )
    if len(errors) == calls:
        raise RewardError(f"{found}; fix the reward function")
    return found


def _errors(process: RewardProcess, question: Question, empty: bool, limit_s: float) -> list[str]:
    """Score one response; return the error as a list, which is empty after success."""
    truth = question.ground_truth
    text = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    kind = "an empty response" if empty else "its ground truth"
    sample = {
        "sample_id": f"from prompt {question.row} with {kind}",
        "data_source": question.data_source,
        "solution_str": "" if empty else text,
        "ground_truth": truth,
        "extra_info": question.extra_info,
    }
    try:
        answer = process.ask(sample, limit_s)
    except EndedError as end:
        return [f"{at_sample(sample['sample_id'], question.data_source)}: {end}"]
    return [answer["error"]] if "error" in answer else []
