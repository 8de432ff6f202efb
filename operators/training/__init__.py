"""The program of a training rank: Megatron-core, routing replay, policy export."""

import warnings

# Repeated warnings of Megatron-core and mbridge about themselves, which users cannot act on. Apex
# is never needed; on CPU neither is Transformer Engine, and with CUDA, building a model without it
# fails anyway.
for _message in (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",  # Megatron-core's own default of cuda_graph_scope
    r"`torch\.distributed\.\w+_tensor` is deprecated",  # Megatron-core's collectives
    "`load_state_dict` is deprecated",  # Megatron-core's checkpoints, of torch's
    "Please use DTensor instead",
):
    warnings.filterwarnings("ignore", message=_message)
