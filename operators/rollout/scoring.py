"""Computes rewards in separate processes that cannot reach the engine or the credentials.

    engine's thread    finished response ──► submit ─┐
    N threads          decode ─► one process each, a sample at a time, at most reward.timeout_s
    writer's thread    waits for the sample's future, in the order of the responses

If a process hangs, crashes or is killed, only its current sample fails, and the next sample gets a
new process.
"""

import logging
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import LifoQueue
from types import TracebackType
from typing import Any, Self

from operators.rollout.prompts import Wanted
from pipeline.config.reward import Reward
from pipeline.rl.data_sources import find_scorer
from pipeline.rl.rewards import MEND, RewardError, at_sample, overlong_penalty
from pipeline.scoring.code import RewardCode, unpacked
from pipeline.scoring.process import EndedError, RewardProcess
from pipeline.traces import TraceError
from pipeline.traces.format.domain import TEXT_BYTES, json_text

log = logging.getLogger(__name__)

ERROR_BYTES = 16 << 10
"""The maximum length of the error text in a masked sample, in bytes of UTF-8."""
_PENALTY_BYTES = len(json_text({"overlong_reward": -1.7976931348623157e308}, ""))
"""The maximum length of the text that the penalty on long responses adds."""
_UNWRITABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Scored:
    """A sample's reward, or the error if there is no reward."""

    reward: float | None
    error: str | None
    extras: dict[str, Any]
    left_out: int = 0
    """The number of values that the function returned with the score but a trace cannot hold."""


class Scorer:
    """Runs the reward function in up to `settings.num_workers` processes.

    The constructor starts the first process; each other process is started on its first use.
    Leaving the `with` block ends the processes and cancels waiting samples.

    Args:
        code: The code to run.
        settings: The reward settings.
        start_timeout_s: Seconds that a process may take to load the code.
        max_length: The maximum length of a response in tokens, for the penalty on long responses.

    Raises:
        RewardError: The code cannot be loaded, or loading it takes too long.
    """

    def __init__(
        self, code: RewardCode, settings: Reward, start_timeout_s: float, max_length: int
    ) -> None:
        self._code = code
        self._settings = settings
        self._max_length = max_length
        self._left_out: set[str] = set()
        with ExitStack() as opened:
            path = opened.enter_context(unpacked(code.content))
            self._processes = [
                RewardProcess(code, path, start_timeout_s) for _ in range(settings.num_workers)
            ]
            opened.callback(self._processes[0].end)
            self._processes[0].start()
            self._opened = opened.pop_all()
        # Last in, first out, so that no more processes are started than are needed simultaneously.
        self._idle: LifoQueue[RewardProcess] = LifoQueue()
        for process in reversed(self._processes):
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="reward")

    def submit(self, wanted: Wanted, text: Callable[[], str], length: int) -> Future[Scored]:
        """Submit a response for scoring.

        Args:
            wanted: The planned sample.
            text: Decodes the response; it is called in a scoring thread.
            length: The length of the response in tokens.

        Returns:
            A future. If scoring fails and errors are not masked, the future raises a RewardError
            that names the sample.
        """
        return self._threads.submit(self._scored, wanted, text, length)

    def close(self) -> None:
        """End all processes, including those that hang."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.stop()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.end()
        self._opened.close()

    def _scored(self, wanted: Wanted, text: Callable[[], str], length: int) -> Scored:
        prompt = wanted.prompt
        sample = {
            "sample_id": wanted.id,
            "data_source": prompt.data_source,
            "solution_str": text(),
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        process = self._idle.get()
        try:
            answer = process.ask(sample, self._settings.timeout_s)
        except EndedError as end:
            answer = self._without_answer(wanted, str(end))
        finally:
            self._idle.put(process)
        if "error" not in answer:
            return self._with_penalty(self._kept(answer), length)
        error = f"{answer['error']}; {MEND}"
        if self._settings.on_error == "fail":
            raise RewardError(error)
        return Scored(None, _writable(error), {})

    def _kept(self, answer: dict[str, Any]) -> Scored:
        """Return the result without the values that a trace cannot hold, which are logged once."""
        extras, unfit = _that_fit(answer["extras"])
        unfit = {**answer["left_out"], **unfit}
        for name in sorted(unfit.keys() - self._left_out):
            log.warning("reward function: %s is left out of the samples: %s", name, unfit[name])
        self._left_out |= unfit.keys()
        return Scored(answer["reward"], None, extras, len(unfit))

    def _with_penalty(self, scored: Scored, length: int) -> Scored:
        overlong = self._settings.reward_kwargs.overlong_buffer_cfg
        if not overlong.enable or scored.reward is None:
            return scored
        penalty = overlong_penalty(length, self._max_length, overlong.len, overlong.penalty_factor)
        extras = {**scored.extras, "overlong_reward": penalty}
        return replace(scored, reward=scored.reward + penalty, extras=extras)

    def _without_answer(self, wanted: Wanted, how: str) -> dict[str, Any]:
        source = wanted.prompt.data_source
        if self._code.content is None and (scorer := find_scorer(source)) is not None:
            # As in verl, an answer that cannot be compared counts as wrong.
            return {"reward": scorer.wrong_reward, "extras": {"acc": False}, "left_out": {}}
        return {"error": f"{at_sample(wanted.id, source)}: the reward function failed: {how}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _writable(error: str) -> str:
    """Return an error's text in a form that a trace can store and a terminal can show.

    U+FFFD replaces unpaired surrogates, and control characters other than line feeds and tabs. A
    text longer than ERROR_BYTES in UTF-8 is truncated and ends with "...".
    """
    text = _UNWRITABLE.sub("\ufffd", error)
    if len(content := text.encode()) <= ERROR_BYTES:
        return text
    return content[: ERROR_BYTES - 3].decode(errors="ignore") + "..."


def _that_fit(extras: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the extras that a trace can hold, and the reason for each of the others, by name."""
    fitting: dict[str, Any] = {}
    unfit: dict[str, str] = {}
    room = TEXT_BYTES - _PENALTY_BYTES
    for name, value in extras.items():
        try:
            size = len(json_text({name: value}, "reward function").encode())
        except TraceError as error:
            unfit[_writable(name)] = _writable(str(error))
            continue
        if size > room:
            unfit[name] = f"with it, the sample's values would exceed {TEXT_BYTES} bytes"
            continue
        room -= size
        fitting[name] = value
    return fitting, unfit
