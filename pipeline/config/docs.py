"""Generate docs/config.md, the page on Retrace's settings and its treatment of verl's settings.

`python -m pipeline.config.docs` writes the file; a test checks that it is up to date.
"""

import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from pydantic_core import PydanticUndefined

from pipeline.config.keys import Key, all_keys
from pipeline.config.reading.foreign import Concern, Foreign
from pipeline.config.reading.verl import ALIASES, FOREIGN
from pipeline.model.families import FAMILIES, REFUSED_FAMILIES, REFUSED_OTHER

_INTRODUCTION = """\
# Settings

<!-- Generated from pipeline/config by `make docs`; do not edit. -->

A YAML file contains the settings of a run. On the command line, `key.path=value` overrides a
setting in the file, as in verl:

    retrace run CONFIG.yaml trainer.total_training_steps=20 actor_rollout_ref.actor.optim.lr=1e-6

A `+` or `++` before the key is accepted, but has no effect.

Retrace checks all settings before it starts anything, and reports all problems together.
`retrace check` performs these checks without starting a run. Unknown keys are refused. Settings
that also exist in verl have the same names as in verl. Relative paths are relative to the working
directory. Retrace does not support Hydra's `defaults` or interpolation (`${...}`).
`retrace import-verl` converts files that use these features into one settings file
([from-verl.md](from-verl.md)).

If you start a run with the name of an existing run (`trainer.experiment_name`), you attach to that
run. The values of settings marked ↻ may then differ from those of the existing run. All other
settings make up the run's identity, so different values are refused. For inputs (marked #), Retrace
compares the contents, not the paths. An input and its settings (for example, a reward function and
`reward.*`) may still be corrected until the run uses the input. [run-folder.md](run-folder.md)
explains when an input counts as used. `store.uri` specifies only where the run is stored, so it is
not part of the run's identity.

Settings with **required** in the default column must be set.
"""

_MODELS = """
## Models

`actor_rollout_ref.model.path` must name a model of one of these families (`model_type` in
config.json). Tests compare a tiny model of each family with transformers' implementation.
Megatron-core's logits must agree with those of transformers. Converting the weights to
Megatron-core's form and back must leave every bit unchanged. For families with experts, vLLM's
probabilities and routes must also agree. If a model has more than 256 experts, each expert id takes
two bytes in traces. A model may have at most 65,536 experts.

| model_type | layers | RoPE | other features |
|---|---|---|---|
"""

_REFUSED_MODELS = """
All other families are refused. Some of them are refused for these reasons:

{refused}

Any other family is refused because {others}.

Models with features that Megatron-core would not compute exactly are also refused:

- in all families: quantised weights, a partial rotary embedding (except `glm4_moe`), a sliding
  window, and any activation other than SiLU;
- in DeepSeek-V3 and GLM-4-MoE: scores that are not normalised and, if there are several groups of
  experts, a `num_experts_per_tok` other than twice `topk_group`;
- in DeepSeek-V3: a rotary embedding that is not interleaved.
"""

_FOREIGN = """
## verl's other settings

Of the 4,334 settings in 148 of verl's scripts, Retrace accepts 3,657, ignores 644 and refuses 33
([from-verl.md](from-verl.md#verls-own-scripts)).

A file written for verl may contain settings that have no counterpart here. Apart from seeds and
sample orders, Retrace never ignores a setting that would change results. It reports
ignored settings in a note. Each setting below belongs to one of the following kinds. The kind
determines which values are ignored:

{kinds}

Every other value is refused with a message that gives the reason and the fix. Null values and
empty groups have no effect and are ignored. In keys, `*` matches any characters. If several rows
match a key, the first one applies. For the kind *unread*, the key in parentheses names
the setting that determines whether verl reads the setting in that row.

| verl's key | outcome | kind | reason |
|---|---|---|---|
"""


def render() -> str:
    """Return the complete page."""
    parts = [_INTRODUCTION, *_sections(), _MODELS, *_families(), _refused_models()]
    kinds = "\n".join(f"- **{concern.name.lower()}**: {concern.value}." for concern in Concern)
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
            yield f"\n## {group.name}\n\n{cleandoc(group.section.__doc__ or '')}\n"
            yield "\n| key | value | default | description |\n|---|---|---|---|\n"
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
        "\n## Other spellings\n\n"
        "If a file uses two spellings of one setting, their values must be equal, "
        "unless one of the values is null or the default.\n\n"
        "| also accepted | the same as |\n|---|---|\n" + "".join(lines)
    )


def main() -> None:
    """Write docs/config.md in the working directory."""
    target = Path("docs/config.md")
    if not target.parent.is_dir():
        sys.exit("the folder docs/ does not exist here; run this command in the repository's root")
    target.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
