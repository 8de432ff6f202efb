"""The packages of each extra of the distribution, and the error for a missing package."""

from importlib.util import find_spec

from pipeline.errors import InputError

EXTRAS = {
    "": ("tokenizers",),
    "flow": (
        *("httpx", "huggingface_hub", "jinja2"),
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
"""The import names of each extra's packages. The key '' lists the packages that are always
installed, except with --no-deps. An installation with --no-deps suffices to read and write traces.
"""

_HINTS = {
    "rollout-cpu": " (on GPUs: 'retrace-moe[rollout-cuda]')",
}


def need(extra: str, who: str) -> None:
    """Raise InputError if a package of an extra is missing.

    For the message, `who` names the part of Retrace that needs the extra.
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        distribution = f"retrace-moe[{extra}]" if extra else "retrace-moe"
        raise InputError(
            [
                f"this installation of retrace has no {', '.join(missing)}, which {who} needs: "
                f"pip install '{distribution}'{_HINTS.get(extra, '')}"
            ]
        )
