"""The program of a training rank: Megatron-core, routing replay, policy export."""

import warnings

# Megatron-core and mbridge repeat these warnings, and users cannot act on them. Retrace never needs
# Apex. It needs Transformer Engine only with CUDA, where building a model without it fails anyway.
for _message in (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",  # Megatron-core's own default of cuda_graph_scope
    r"`torch\.distributed\.\w+_tensor` is deprecated",  # Megatron-core's collectives
    "`load_state_dict` is deprecated",  # torch's function, called by Megatron-core's checkpoints
    "Please use DTensor instead",
):
    warnings.filterwarnings("ignore", message=_message)
