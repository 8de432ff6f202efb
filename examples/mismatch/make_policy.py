"""Build the experiment's policy and its dense twin: python -m examples.mismatch.make_policy

The arguments are the output folder (default: outputs/mismatch/policy) and the policies to build:
moe, dense or both (default). The program trains each policy from random weights on answers with
deliberate mistakes. The policy of examples/addition was trained in the same way; the README there
gives the reason. The text format, the tokenizer and the problems are also the same as in
examples/addition. The model has a different shape: with more experts, the engine and trainer can
disagree more often. The seeds are fixed. The last bits of the weights depend on library versions
and on the processor.
"""

import sys
from pathlib import Path
from typing import Any

ADDITION = Path(__file__).parents[1] / "addition"

SEED = 20
HIDDEN, LAYERS = 64, 6
EXPERTS, TOPK = 128, 8
EXPERT_SIZE = 32  # vLLM's CPU build requires a multiple of 32
STEPS = {"moe": 450, "dense": 450}
"""The number of supervised steps of each policy. Afterwards, 40 to 45% of a policy's answers are
correct, as in the training data."""


def policy_config(kind: str, tokenizer: Any) -> Any:
    """Return the configuration of the model `moe` or `dense`.

    The MoE model has 6 layers of 128 experts of width 32, top-8 with normalised weights, hidden
    size 64 and 5 million weights. The dense model has no router. Instead of experts, it has an MLP
    of width 256, as wide as eight experts, so that the arithmetic per token is the same.
    """
    from make_model import AUX_LOSS_COEF
    from transformers import Qwen3Config, Qwen3MoeConfig

    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "max_position_embeddings": 512,
        "initializer_range": 0.125,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "dense":
        return Qwen3Config(**shared, intermediate_size=TOPK * EXPERT_SIZE)
    return Qwen3MoeConfig(
        **shared,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=EXPERT_SIZE,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=AUX_LOSS_COEF,
        output_router_logits=True,
        experts_implementation="grouped_mm",
    )


def make_policy(kind: str, folder: Path, steps: int) -> float:
    """Train a policy from random weights, write it to a folder, and return its mean reward.

    The folder gets its final name only after all files are written, so an existing folder is
    complete.

    Args:
        kind: `moe` or `dense`.
        folder: The output folder.
        steps: The number of supervised steps.

    Returns:
        The mean reward of 4 samples per validation problem, at temperature 1.
    """
    sys.path.insert(0, str(ADDITION))  # these scripts import each other by their bare names
    import torch
    from make_model import accuracy, save, train
    from make_tokenizer import make_tokenizer
    from problems import VAL, WARM_UP, split
    from transformers import AutoModelForCausalLM

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(unfinished)
    model = AutoModelForCausalLM.from_config(policy_config(kind, tokenizer))
    parts = split()
    train(model, tokenizer, parts[WARM_UP], steps)
    save(model.to(torch.bfloat16), tokenizer, unfinished)
    unfinished.rename(folder)
    return accuracy(model, tokenizer, parts[VAL], temperature=1.0, n=4)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("outputs/mismatch/policy")
    for kind in sys.argv[2:] or STEPS:
        steps = STEPS[kind]
        if (folder / kind).is_dir():
            print(f"{folder / kind} already exists")
            continue
        print(f"{folder / kind}: {steps} steps", flush=True)
        print(f"{folder / kind}: mean reward {make_policy(kind, folder / kind, steps):.3f}")


if __name__ == "__main__":
    main()
