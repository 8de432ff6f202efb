"""Build the example's policy from random weights: python examples/addition/make_model.py [FOLDER]

The program trains a tiny Qwen3-MoE on answers with random slips, as a careless pupil would write
them. The model learns to add, and to make slips as often as the pupil. README.md explains the
purpose of the slips. Training takes 4 minutes on one core.
"""

import json
import random
import sys
from pathlib import Path

import torch
from make_tokenizer import IM_END, make_tokenizer
from problems import VAL, WARM_UP, Problem, draw_slips, split, worked_answer
from reward import compute_score
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 20
STEPS = 1200
BATCH = 64
LR = 2e-3
SLIP_RATE = 0.25  # for each of three results; 0.75**3 = 0.42 of the worked answers are correct
LR_WARM_UP_STEPS = 20
AUX_LOSS_COEF = 0.002
IGNORED = -100  # the label for positions without loss


def model_config(tokenizer) -> Qwen3MoeConfig:
    """Return a configuration of four MoE layers with 16 experts each, top-4.

    Every size is divisible by 2, for TP, PP x VPP and EP.
    """
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=AUX_LOSS_COEF,
        output_router_logits=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        max_position_embeddings=512,
        initializer_range=0.125,
        tie_word_embeddings=False,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def prompt_ids(tokenizer, problem: Problem) -> list[int]:
    """Return the token ids of the question in the chat template, up to the start of the answer."""
    messages = [{"role": "user", "content": problem.question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def encode(tokenizer, problems: list[Problem], rng) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and labels of answers with random slips.

    Args:
        tokenizer: The example's tokenizer.
        problems: The problems to answer.
        rng: A random.Random, which draws the slips.

    Returns:
        Two int64 tensors [problems, length]. Prompts and padding are labelled IGNORED.
    """
    rows, labels = [], []
    for problem in problems:
        prompt = prompt_ids(tokenizer, problem)
        answer = worked_answer(problem, draw_slips(rng, SLIP_RATE)) + IM_END
        answer_ids = tokenizer(answer)["input_ids"]
        rows.append(prompt + answer_ids)
        labels.append([IGNORED] * len(prompt) + answer_ids)
    length = max(map(len, rows))
    rows = [row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows]
    labels = [row + [IGNORED] * (length - len(row)) for row in labels]
    return torch.tensor(rows), torch.tensor(labels)


def train(model, tokenizer, problems: list[Problem], steps: int = STEPS) -> None:
    """Train a model on random problems with random slips.

    After a short warm-up, the learning rate falls linearly to zero.

    Args:
        model: The model, which is changed.
        tokenizer: The example's tokenizer.
        problems: The problems to draw from.
        steps: The number of supervised steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    rng = random.Random(SEED)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min((step + 1) / LR_WARM_UP_STEPS, 1 - step / steps)
        tokens, labels = encode(tokenizer, rng.sample(problems, BATCH), rng)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(model, tokenizer, problems: list[Problem], temperature: float, n: int) -> float:
    """Return the mean reward of sampled answers.

    Args:
        model: The model.
        tokenizer: The example's tokenizer.
        problems: The problems to answer.
        temperature: The sampling temperature; 0 selects greedy decoding.
        n: The number of samples per problem.
    """
    model.eval()
    prompts = torch.tensor([prompt_ids(tokenizer, p) for p in problems]).repeat_interleave(n, 0)
    torch.manual_seed(SEED)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    tokens = model.generate(
        prompts,
        max_new_tokens=32,
        pad_token_id=tokenizer.pad_token_id,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    texts = tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)
    answers = [problem.answer for problem in problems for _ in range(n)]
    return sum(map(compute_score, [""] * len(texts), texts, answers)) / len(texts)


def save(model, tokenizer, folder: Path) -> None:
    """Write the weights as one safetensors file, and config files with Qwen3's keys.

    transformers 5 writes different names for num_experts and rope_theta, but reads both spellings.

    Args:
        model: The model, whose configuration is changed.
        tokenizer: The tokenizer, which defines the end-of-turn and padding tokens.
        folder: The output folder.
    """
    model.config.output_router_logits = False
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model"
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(folder)
    model = Qwen3MoeForCausalLM(model_config(tokenizer))
    parts = split()
    train(model, tokenizer, parts[WARM_UP])
    save(model.to(torch.bfloat16), tokenizer, folder)
    print(f"temperature 1: {accuracy(model, tokenizer, parts[VAL], 1.0, 16):.3f}")
    print(f"greedy: {accuracy(model, tokenizer, parts[VAL], 0.0, 1):.3f}")


if __name__ == "__main__":
    main()
