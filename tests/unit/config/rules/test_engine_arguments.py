"""Which of vLLM's engine arguments a run may set."""

import dataclasses

import pytest

from pipeline.config.rules.engine_arguments import ACCEPTED, OWNED, REFUSED, engine_problems
from tests.unit.config.settings import ROLLOUT, load, problems

KWARGS = f"{ROLLOUT}.engine_kwargs.vllm"


def test_the_tables_are_the_arguments_of_the_installed_engine():
    """A new release's arguments are a decision: do they make routes or log-probs wrong?"""
    from vllm.engine.arg_utils import EngineArgs

    listed = [*OWNED, *REFUSED, *ACCEPTED]
    assert len(listed) == len(set(listed))
    assert set(listed) == {field.name for field in dataclasses.fields(EngineArgs)}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("speculative_config={method: ngram}", "drafted tokens are accepted many at a time"),
        ("enable_prefix_caching=False", "routes are stored in blocks beside those of the prefix"),
        ("quantization=fp8", "other weights than the trainer's, and other log-probs; leave it out"),
        ("enable_dbo=True", "overwrite one another's routes; leave it out"),
        ("kv_cache_dtype=fp8", "move log-probs away from the trainer's; leave it out"),
        ("dtype=float16", f"has a setting of its own; write {ROLLOUT}.dtype instead"),
        ("seed=3", "has a setting of its own; write trainer.seed instead"),
        ("enable_return_routed_experts=False", "enable_rollout_routing_replay instead"),
        ("enable_chunked_prefil=True", "of vLLM 0.32.0; did you mean enable_chunked_prefill?"),
        ("xyz=1", "no engine argument of vLLM 0.32.0; leave it out"),
    ],
)
def test_what_breaks_routes_or_logprobs_is_refused_by_name(tmp_path, setting, text):
    [problem] = problems(tmp_path, f"+{KWARGS}.{setting}")
    assert problem.startswith(f"{KWARGS}.{setting.partition('=')[0]}: ")
    assert text in problem


def test_others_reach_the_engine(tmp_path):
    settings = (
        f"+{KWARGS}.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
        f"+{KWARGS}.compilation_config.cudagraph_capture_sizes=[4,12]",
        f"{KWARGS}.async_scheduling=True",
    )
    config = load(tmp_path, *settings).config
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [4, 12],
        },
        "async_scheduling": True,
    }
    assert problems(tmp_path, *settings) == []
    assert list(engine_problems(dict.fromkeys(ACCEPTED, 1))) == []
