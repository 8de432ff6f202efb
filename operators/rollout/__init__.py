"""The program of a rollout worker: vLLM in, samples and routes out."""
