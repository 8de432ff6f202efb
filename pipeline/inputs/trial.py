"""The trial of a run's reward function when its inputs are staged on this machine."""

import json
from typing import Any

from pipeline.errors import InputError
from pipeline.inputs.checked import CheckedInputs
from pipeline.rl.rewards import RewardError
from pipeline.run.uses import first_use
from pipeline.scoring.code import RewardCode
from pipeline.scoring.trial import Question, tried_rows, try_reward


def try_staged_reward(inputs: CheckedInputs) -> str | None:
    """Try the reward function in a reward process if it has scored no sample of the run yet.

    Returns:
        A note if the function fails on some inputs; None if it fails on none, or was not tried.

    Raises:
        InputError: The function cannot be loaded, or it fails on all inputs.
        StoreError: The store fails.
    """
    config = inputs.config
    replays = config.actor_rollout_ref.actor.router_replay.replay_file is not None
    if replays or first_use(inputs.store, "reward") is not None:
        return None
    function = config.custom_reward_function
    code = RewardCode(None)
    if function is not None:
        code = RewardCode(inputs.reward, function.name, function.reward_kwargs)
    questions = [_question(inputs, row) for row in tried_rows(inputs.prompt_count)]
    try:
        return try_reward(code, questions, config.reward.timeout_s, config.launch.start_timeout_s)
    except RewardError as error:
        raise InputError([f"custom_reward_function.path: {error}"]) from error


def _question(inputs: CheckedInputs, row: int) -> Question:
    def value(column: str) -> Any:
        return inputs.prompts.table[column][row].as_py()

    extra_info = value("extra_info")
    return Question(
        row,
        value("data_source"),
        json.loads(value("ground_truth")),
        {} if extra_info is None else json.loads(extra_info),
    )
