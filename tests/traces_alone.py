"""Check that traces need only pyarrow, numpy, msgspec and boto3, as docs/library.md promises.

    python -P tests/traces_alone.py FOLDER [--hide]

Run this program in an environment that contains only these packages and their requirements. With
--hide, the program first hides all other packages of the environment. It then writes and seals a
step, reads the step's samples and routes, and opens a store of each kind.
"""

import importlib.abc
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NEEDED = ("pyarrow", "numpy", "msgspec", "boto3")
OURS = {"pipeline", "retrace"}


class OthersHidden(importlib.abc.MetaPathFinder):
    """An import finder that hides installed modules, except ours, NEEDED and their requirements."""

    def __init__(self) -> None:
        needed = set(closure(NEEDED))
        self._hidden = {
            module
            for module, owners in importlib.metadata.packages_distributions().items()
            if module not in OURS and not needed & {normal(owner) for owner in owners}
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self._hidden:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden)", name=name)
        return None


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def closure(names: Sequence[str]) -> Iterator[str]:
    """Yield the given distributions and all of their requirements, except those of extras."""
    waiting, seen = list(names), set()
    while waiting:
        name = normal(waiting.pop())
        if name not in seen:
            seen.add(name)
            yield name
            for required in importlib.metadata.requires(name) or ():
                if "extra ==" not in required:
                    waiting.append(re.match(r"[\w.-]+", required)[0])


def use_traces(folder: str) -> None:
    import numpy as np

    import retrace

    rng = np.random.default_rng(0)
    experts = rng.random((4, 3, 16)).argsort(axis=-1)[..., :2]
    store = retrace.open_store(folder)
    samples = [
        retrace.traces.new_sample(0, "17", k, [5, 6, 7], [11, 12], experts) for k in range(2)
    ]
    geometry = retrace.traces.Geometry(experts=16, topk=2, layers=(0, 1, 2))
    retrace.traces.write_step(
        store, 0, samples, geometry, retrace.traces.Provenance("R3", 0, "an engine")
    )
    manifest = retrace.traces.read_manifest(store, 0)
    ids = [sample.id for sample in samples]
    read = retrace.traces.read_samples(store, manifest, ids)
    assert [sample.response_tokens_G.tolist() for sample in read] == [[11, 12], [11, 12]]
    routes = retrace.traces.read_routes(store, manifest, ids, layers=[1, 2])
    assert (routes[ids[1]].sets_TLK == np.sort(experts[:, 1:])).all()
    (sample,) = retrace.open_run(folder).step(0).samples([ids[1]], layers=[2])
    assert (sample.routes.sets_TLK == np.sort(experts[:, 2:])).all()
    assert retrace.open_store("s3://bucket/prefix").uri == "s3://bucket/prefix"


def main() -> None:
    if "--hide" in sys.argv:
        sys.meta_path.insert(0, OthersHidden())
    try:
        import pydantic  # noqa: F401
    except ModuleNotFoundError:
        use_traces(sys.argv[1])
    else:
        sys.exit("found pydantic, expected an environment without it; pass --hide")


if __name__ == "__main__":
    main()
