"""What a critic makes of a step in a layout: its values, and the gradients of its first mini-batch.

Both are saved under names that no layout changes: values by sample, gradients by the HF weights'
names, gathered over all ranks as an export gathers weights.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from operators.training.batches.step_data import StepData
from operators.training.megatron import value_head
from operators.training.megatron.local_layers import NamedForBridge
from operators.training.passes.compared import compare
from operators.training.passes.critic_passes import critic_gradients, layouts_of, values_pass
from operators.training.rank import Rank, TrainedCritic, make_critic
from pipeline.config.keys import with_value

HEAD = "value head"
_WHOLE = "actor_rollout_ref.actor.megatron.use_distributed_optimizer"


def save_values(rank: Rank, data: StepData, model: Path, target: Path) -> None:
    """Write `<target>.<rank>.npz` on each rank that has any of it."""
    # Every rank then has whole gradients.
    critic = make_critic(with_value(rank.config, _WHOLE, False), model)
    rank = replace(rank, critic=critic)
    values = values_pass(rank, critic, data, None).values
    engine = {id: sample.logprobs_G for id, sample in data.samples.items()}
    compared = compare(rank, data, engine, None, values=values)
    mini_batch = layouts_of(data).updates.mini_batches[0]
    reports, _ = critic_gradients(rank, critic, data, mini_batch, compared, None)
    found = {f"value/{id}": of_tokens for id, of_tokens in values.items()}
    if rank.position.last_stage:
        found |= {f"return/{id}": of_tokens for id, of_tokens in compared.returns.items()}
        found["reports"] = np.array([float(report["vf_loss"]) for report in reports])
    found |= {f"gradient/{name}": array for name, array in gradients_of(critic).items()}
    np.savez(f"{target}.{torch.distributed.get_rank()}.npz", **found)


def gradients_of(critic: TrainedCritic) -> dict[str, np.ndarray]:
    """Gradients by HF name, whole, on rank 0; the value head's on the last stage. The weights are
    lost."""
    found, views = {}, []
    for chunk in critic.model.bare_chunks:
        for name, parameter in chunk.named_parameters():
            if name == value_head.NAME:
                found[HEAD] = parameter.main_grad.numpy().copy()
            with torch.no_grad():
                parameter.copy_(parameter.main_grad)
        views.append(NamedForBridge(chunk, (value_head.NAME,)))
    gathered = list(critic.model.bridge.export_weights(views))
    if torch.distributed.get_rank() == 0:
        found |= {name: gradient.detach().numpy().copy() for name, gradient in gathered}
    return found
