"""All code that depends on Megatron-core and mbridge: model, weights, optimizer, schedules."""
