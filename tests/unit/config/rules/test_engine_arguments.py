"""A run may set only the vLLM engine arguments that keep routes and log-probs correct."""

import dataclasses

import pytest

from pipeline.config.rules.engine_arguments import ACCEPTED, OWNED, REFUSED, engine_problems
from tests.unit.config.settings import ROLLOUT, load, problems

KWARGS = f"{ROLLOUT}.engine_kwargs.vllm"


def test_the_tables_match_the_installed_engine():
    """A new argument needs a decision: could it lead to incorrect routes or log-probs?"""
    from vllm.engine.arg_utils import EngineArgs

    listed = [*OWNED, *REFUSED, *ACCEPTED]
    assert len(listed) == len(set(listed))
    assert set(listed) == {field.name for field in dataclasses.fields(EngineArgs)}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("speculative_config={method: ngram}", "drafted tokens are accepted several at a"),
        ("enable_prefix_caching=False", "routes are stored in blocks next to those of"),
        ("quantization=fp8", "weights and log-probs would differ from the trainer's; leave"),
        ("quantization=null", "found null; "),
        ("enable_dbo=True", "overwrite each other's routes; leave it out"),
        ("kv_cache_dtype=fp8", "shift log-probs away from the trainer's; leave it out"),
        ("dtype=float16", f"has its own setting; use {ROLLOUT}.dtype instead"),
        ("seed=3", "has its own setting; use trainer.seed instead"),
        ("enable_return_routed_experts=False", "enable_rollout_routing_replay instead"),
        ("enable_chunked_prefil=True", "of vLLM 0.32.0; did you mean enable_chunked_prefill?"),
        ("xyz=1", "not an engine argument of vLLM 0.32.0; leave it out"),
    ],
)
def test_arguments_that_break_routes_or_logprobs_are_refused(tmp_path, setting, text):
    [problem] = problems(tmp_path, f"+{KWARGS}.{setting}")
    assert problem.startswith(f"{KWARGS}.{setting.partition('=')[0]}: ")
    assert text in problem


def test_other_arguments_are_passed_to_the_engine(tmp_path):
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
