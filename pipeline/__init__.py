"""Retrace: record the expert routing of rollouts, replay it in training.

`pipeline` is the light half: config, object store, trace format, flow, launcher. Importing it
needs neither torch, vLLM nor Megatron; those live in `operators`, one program per kind of worker.
"""

__version__ = "0.1.0"
