"""The rollout worker: it generates samples and their routes with vLLM."""
