"""Whether this installation has what a flow needs: workers and readers of traces lack it."""

from importlib.util import find_spec

from pipeline.errors import InputError

_FLOW = ("huggingface_hub", "jinja2", "prefect", "psutil", "tensorboard", "transformers")


def need_flow() -> None:
    """Raise InputError when a package of the extra `flow` is missing."""
    missing = [name for name in _FLOW if find_spec(name) is None]
    if missing:
        raise InputError(
            [
                f"this installation of retrace has no {', '.join(missing)}, which `retrace run` "
                "and `retrace check` need; install the extra: pip install 'retrace-moe[flow]'"
            ]
        )
