"""Everything that replaces a part of a GPU run on machines without GPUs.

Runs on CPU use the same programs as runs on GPUs. Only these modules know the difference. Each
replaces something that needs CUDA, with as little code as possible.

- `without_cuda` replaces the CUDA devices, streams and generators that Megatron-core uses
  unconditionally, and the settings that select CUDA kernels.
- `layers` replaces Transformer Engine's layers by Megatron-core's own, and names their weights as
  mbridge expects.
- `attention` replaces Transformer Engine's attention, which supports packed sequences and context
  parallelism.
- `adam_resume` replaces the part of Transformer Engine's FusedAdam that resumes from a checkpoint.
- `matmul` replaces tensor cores: it selects the fastest products of bfloat16 matrices.
- `vllm_build` replaces Model Runner V2, with which vLLM returns routes, in vLLM's CPU build. Only
  rollouts import this module, and only training imports the others.
"""
