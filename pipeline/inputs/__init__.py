"""The inputs of a run: model, prompts and reward function, checked and then staged."""
