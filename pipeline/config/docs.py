"""Generator of docs/config.md: every setting of ours, and the treatment of each of verl's.

`python -m pipeline.config.docs` writes the file; a test checks that it is up to date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic_core import PydanticUndefined

from pipeline.config.keys import Key, all_keys
from pipeline.config.reading.foreign import Concern, Foreign
from pipeline.config.reading.verl import ALIASES, FOREIGN
from pipeline.model.families import FAMILIES, REFUSED_FAMILIES, REFUSED_OTHER

_INTRODUCTION = """\
# Settings

<!-- Generated from pipeline/config by `make docs`; do not edit. -->

A run is described by a YAML file, with `key.path=value` overrides on the command line, as verl's
users write them (a leading `+` or `++` is accepted and means nothing):

    retrace run CONFIG.yaml trainer.total_training_steps=20 actor_rollout_ref.actor.optim.lr=1e-6

Everything is checked before anything starts, and all problems are shown together; `retrace check`
does only that. Unknown keys are refused. Names are verl's where verl has one. Relative paths are
relative to the working directory. Hydra's `defaults` and interpolation (`${...}`) are not read:
`retrace import-verl` makes one file of them ([from-verl.md](from-verl.md)).

A run is attached again by its name (`trainer.experiment_name`). Settings marked ↻ may change then;
all others are the run's identity, and another value is refused. Of inputs (marked #) the content
counts, not the path. An input and the settings that go with it (a reward function with `reward.*`)
may still be mended while nothing was made with them; [run-folder.md](run-folder.md) says until
when. `store.*` only says where the run is.

Where the default is **required**, the setting must be written.
"""

_MODELS = """
## Models

`actor_rollout_ref.model.path` is a model of one of these families (`model_type` in config.json).
Tests hold each, at tiny size, to transformers' own model: Megatron-core's logits, every bit of the
weights that come back, and of those with experts vLLM's probabilities and routes. Ids of more than
256 experts take two bytes in traces; 65,536 are the most.

| model_type | layers | RoPE | besides |
|---|---|---|---|
"""

_REFUSED_MODELS = """
All other families are refused. The reasons for some:

{refused}

For the rest: {others}.

Refused, too, is a model that Megatron-core would not compute as it is: quantised weights, a partial
rotary embedding (but for `glm4_moe`), a sliding window, another activation than SiLU; with
DeepSeek-V3 and GLM-4-MoE also scores that are not normalised, and of several groups
`num_experts_per_tok` other than twice `topk_group`; with DeepSeek-V3 a rotary embedding that is not
interleaved.
"""

_FOREIGN = """
## verl's other settings

A file written for verl may hold settings that have no counterpart here. Nothing that alters a
number is ignored: what is ignored, with a note, concerns

{kinds}

All else is refused, with the reason and what to write. Null and an empty group say nothing, and are
ignored. In names, `*` stands for any characters. The first line that matches counts.

| verl's key | outcome | concerns | reason |
|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, *_sections(), _MODELS, *_families(), _refused_models()]
    kinds = "\n".join(f"- **{concern.name.lower()}**: {concern.value};" for concern in Concern)
    parts += [_aliases(), _FOREIGN.format(kinds=kinds)]
    parts += [
        f"| `{f.pattern}` | {f.outcome} | {f.concern.name.lower()}{_unless(f)} | {f.reason} |\n"
        for f in FOREIGN
    ]
    return "".join(parts)


def _unless(entry: Foreign) -> str:
    return f" (`{entry.guard}`)" if entry.guard else ""


def _families() -> Iterator[str]:
    for name, family in FAMILIES.items():
        layers = "MoE" if family.moe else "dense"
        yield f"| `{name}` | {layers} | {', '.join(family.rope_types)} | {family.has} |\n"


def _refused_models() -> str:
    reasons = ";\n".join(f"- `{name}`: {reason}" for name, reason in REFUSED_FAMILIES.items())
    return _REFUSED_MODELS.format(refused=f"{reasons}.", others=REFUSED_OTHER)


def _sections() -> Iterator[str]:
    keys = list(all_keys().values())
    groups = [key for key in keys if key.section is not None]
    for group in groups:
        rows = [
            key for key in keys if key.name.rpartition(".")[0] == group.name and not key.section
        ]
        if rows:
            assert group.section is not None
            yield f"\n## {group.name}\n\n{group.section.__doc__}\n"
            yield "\n| key | value | default | |\n|---|---|---|---|\n"
            yield from (_row(key) for key in rows)


def _row(key: Key) -> str:
    name = key.name.rpartition(".")[2]
    mark = " ↻" if key.operational else " #" if key.names_input else ""
    text = (key.field.description or "").replace("|", "\\|")
    expected = key.expected.replace("|", "\\|")
    return f"| `{name}`{mark} | {expected} | {_default(key)} | {text} |\n"


def _default(key: Key) -> str:
    if key.field.is_required():
        return "**required**"
    default = key.default
    if default is None or default is PydanticUndefined:
        return "null"
    return f"`{default}`"


def _aliases() -> str:
    lines = [f"| `{other}.*` | `{ours}.*` |\n" for other, ours in ALIASES.items()]
    return (
        "\n## Other spellings\n\nTwo spellings of one setting that disagree are an error.\n\n"
        "| also accepted | the same as |\n|---|---|\n" + "".join(lines)
    )


def main() -> None:
    """Write docs/config.md in the working directory."""
    target = Path("docs/config.md")
    if not target.parent.is_dir():
        sys.exit("docs/ is not here; run this in the repository's root")
    target.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
