"""Which extra of the distribution has which packages, and what is said where one is missing."""

from importlib.util import find_spec

from pipeline.errors import InputError

EXTRAS = {
    "": ("tokenizers",),
    "flow": (
        *("fastapi", "httpx", "huggingface_hub", "jinja2"),
        *("prefect", "psutil", "tensorboard", "transformers"),
    ),
    "kubernetes": ("asyncpg", "kubernetes", "prefect_kubernetes"),
    "rollout-cpu": ("torch", "vllm"),
    "training": ("einops", "mbridge", "megatron", "psutil", "safetensors", "torch", "transformers"),
    "verl": ("hydra",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy"),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
}
"""Packages by extra, under the names that are imported. '' is no extra: what lacks these was
installed with --no-deps, for traces alone."""

_HINTS = {
    "rollout-cpu": " (on GPUs: 'retrace-moe[rollout-cuda]')",
}


def need(extra: str, who: str) -> None:
    """Raise InputError when a package of an extra is missing; `who` needs it, for the message."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        distribution = f"retrace-moe[{extra}]" if extra else "retrace-moe"
        raise InputError(
            [
                f"this installation of retrace has no {', '.join(missing)}, which {who} needs: "
                f"pip install '{distribution}'{_HINTS.get(extra, '')}"
            ]
        )
