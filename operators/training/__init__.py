"""The program of a training rank: Megatron-core, routing replay, policy export."""
