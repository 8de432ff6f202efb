"""Retrace: record the expert routing of rollouts, and replay it in training.

`pipeline` is the lighter of two packages. It contains the settings, object store, trace format,
flow and launchers. Importing it does not require torch, vLLM or Megatron. Only the other package,
`operators`, which contains one program per kind of worker, uses these libraries.
"""

__version__ = "0.1.0"
