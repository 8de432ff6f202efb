"""What a run is made from: model, prompts and reward function, checked and then staged."""
