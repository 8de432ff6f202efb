"""Save a critic's values for a step and its gradients for the first mini-batch, in any layout.

The names do not depend on the layout. Values are saved under the sample's id, and gradients under
the names of HF weights. Gradients are gathered over all ranks, like the weights in an export.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from operators.training.batches.step_data import StepData
from operators.training.megatron import value_head
from operators.training.megatron.weights import NamedForBridge
from operators.training.passes.compared import compare
from operators.training.passes.critic_passes import critic_gradients, values_pass
from operators.training.rank import Rank, TrainedCritic, make_critic
from pipeline.config.keys import with_value

HEAD = "value head"
_WHOLE = "actor_rollout_ref.actor.megatron.use_distributed_optimizer"


def save_values(rank: Rank, data: StepData, model: Path, target: Path) -> None:
    """Write `<target>.<rank>.npz` on each rank.

    Args:
        rank: This training rank.
        data: The step's data.
        model: The model's folder.
        target: The path of the file without the rank.
    """
    # Without a distributed optimizer, every rank has full gradients.
    critic = make_critic(with_value(rank.config, _WHOLE, False), model)
    rank = replace(rank, critic=critic)
    values = values_pass(rank, critic, data, None).values
    engine = {id: sample.logprobs_G for id, sample in data.samples.items()}
    compared = compare(rank, data, engine, None, values=values)
    mini_batch = data.layouts["critic_update"].mini_batches[0]
    reports, _ = critic_gradients(rank, critic, data, mini_batch, compared, None)
    found = {f"value/{id}": of_tokens for id, of_tokens in values.items()}
    if rank.position.last_stage:
        found |= {f"return/{id}": of_tokens for id, of_tokens in compared.returns.items()}
        found["reports"] = np.array([float(report["vf_loss"]) for report in reports])
    found |= {f"gradient/{name}": array for name, array in gradients_of(critic).items()}
    np.savez(f"{target}.{torch.distributed.get_rank()}.npz", **found)


def gradients_of(critic: TrainedCritic) -> dict[str, np.ndarray]:
    """Return full gradients, keyed by HF name, on rank 0, and the value head's on the last stage.

    The gradients overwrite the weights.
    """
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
