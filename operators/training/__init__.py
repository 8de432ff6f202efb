"""The program of a training rank: Megatron-core, routing replay, policy export."""

import warnings

# What Megatron-core and mbridge say of themselves, over and over, and no user can change. Apex is
# never asked for; on CPU there is no Transformer Engine either, and where CUDA is, building a model
# without it fails by itself.
for _message in (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",  # Megatron-core's own default of cuda_graph_scope
    r"`torch\.distributed\.\w+_tensor` is deprecated",  # Megatron-core's collectives
    "`load_state_dict` is deprecated",  # Megatron-core's checkpoints, of torch's
    "Please use DTensor instead",
):
    warnings.filterwarnings("ignore", message=_message)
