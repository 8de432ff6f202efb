"""Checkpoints of a policy version and its critic: weights, fp32 masters, Adam's moments and step.

    rank r:  its part ─► local files (torch_dist, under TMPDIR) ─► store, share  (saving.py)
    rank 0:  waits for all shares ─► keys.checkpoint(version)

    rank r:  commit, .metadata ─► the files that hold its part ─► its tensors    (loading.py)

A rank writes and reads only its own part of the optimizer state (optimizer_state.py), whatever the
TP, PP, CP, EP and DP sizes are. layouts.py lists the settings that cannot change. Local files are
written while training is paused, because Megatron's asynchronous save does not copy CPU tensors.

In `latest`, `save` and `load`, `version` is n + 1 for a checkpoint after step n. Training continues
at step `version`.
"""

from operators.training.megatron.checkpoint.loading import latest, load
from operators.training.megatron.checkpoint.saving import CheckpointWriter, save

__all__ = ["CheckpointWriter", "latest", "load", "save"]
