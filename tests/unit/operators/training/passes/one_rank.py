"""A real training rank in this process, and the same numbers from plain transformers.

The engine of the sealed step is the same model in transformers. The tests change the log-probs that
the engine "recorded", so that corrections have something to correct. G is the number of response
tokens of a sample.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from operators.training.agree import make_group
from operators.training.batches.step_data import StepData, layout_rules, load_step
from operators.training.megatron import parallel
from operators.training.rank import Rank, make_rank
from pipeline.config.algorithm import RolloutCorrection
from pipeline.config.tree import RunConfig
from pipeline.store import Store
from pipeline.traces import Sample, open_manifest
from tests.integration.training_replay.sealed import TEMPERATURE, config_of, make_run
from tests.tiny_models import make_tiny

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
ACTOR: dict[str, Any] = {
    "router_replay": {"mode": "R3"},
    "entropy_coeff": 0.3,
    "use_kl_loss": True,
    "kl_loss_coef": 0.7,
    "kl_loss_type": "mse",
}


@dataclass(frozen=True)
class World:
    """A rank, its data for a step, and a plain copy of its model."""

    rank: Rank
    folder: Path
    """The model's folder."""
    store: Store

    @cached_property
    def plain(self) -> Any:
        """The model in transformers, float32."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def data(self) -> StepData:
        """Load the step. All its engine log-probs are off by a random amount, and those of
        tokens outside the loss mask are NaN."""
        config = self.rank.config
        sealed = open_manifest(self.store, 0)
        rules = layout_rules(config, 1)
        data = load_step(self.store, sealed, config, rules, 0, self.rank.geometry)
        samples: Any = {}
        for row, id in sorted(data.ids.items()):
            sample = data.samples[id]
            noise_G = np.random.default_rng(row).normal(0, 0.3, len(sample.logprobs_G))
            off_G = np.where(sample.loss_mask_G, sample.logprobs_G + noise_G, np.nan)
            samples[id] = replace(sample, logprobs_G=off_G.astype(np.float32))
        data.samples.close()
        return replace(data, samples=samples)

    def plain_tokens(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs and entropies of a sample's response, [G] each, with gradients."""
        tokens = torch.from_numpy(sample.tokens_S.astype(np.int64))
        logits = self.plain(tokens[None, :-1]).logits[0] / TEMPERATURE
        of_response = slice(len(sample.prompt_tokens_P) - 1, None)
        log_p_GV = logits.log_softmax(-1)[of_response]
        labels_G = tokens[1:][of_response]
        entropy_G = -(log_p_GV.exp() * log_p_GV).sum(-1)
        return log_p_GV.gather(1, labels_G[:, None])[:, 0], entropy_G


@contextmanager
def world(folder: Path, **settings: Any) -> Iterator[World]:
    """Join a process group of one rank, and build the rank and its step in `folder`."""
    config = config_of(**ACTOR, **settings)
    model = make_tiny(folder / "model", "qwen3_moe", **SMALL)
    store = make_run(folder / "run", model, config, steps=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_group(600.0)
        position = parallel.start(config.actor_rollout_ref.actor.megatron)
        rank, _ = make_rank(config, position, model)
        yield World(rank, model, store)
    finally:
        parallel.leave()


def with_correction(rank: Rank, **correction: Any) -> Rank:
    """Return the rank with other settings of `algorithm.rollout_correction`."""
    settings: RunConfig = rank.config
    algorithm = settings.algorithm.model_copy(
        update={"rollout_correction": RolloutCorrection(**correction)}
    )
    return replace(rank, config=settings.model_copy(update={"algorithm": algorithm}))


def norm_of(gradients: Any) -> float:
    """Return the norm over all gradients."""
    return float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
