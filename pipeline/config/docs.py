"""Generate docs/config.md, the page on Retrace's settings and its treatment of verl's settings.

`python -m pipeline.config.docs` writes the file; a test checks that it is up to date.
"""

import sys
from collections.abc import Iterator
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from textwrap import wrap

from pydantic_core import PydanticUndefined

from pipeline.config.keys import Key, all_keys
from pipeline.config.reading.verl import Foreign, foreign_settings
from pipeline.config.reading.verl_keys import ALIASES, NOT_TAKEN_OVER
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
`reward.*`) may still be corrected while the run has committed nothing.
[commands.md](commands.md#changing-a-run) lists what a later start may change. `store.uri` specifies
only where the run is stored, so it is not part of the run's identity.

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

A file written for verl may contain settings that have no counterpart here. Apart from seeds and
sample orders, Retrace never ignores a setting of verl that would change results. A setting in this
table is refused, with the reason, unless its value is null or one that the table accepts. In keys,
`*` matches any characters. If several rows match a key, the first one applies.

| verl's key | accepted values | reason |
|---|---|---|
{refused}
The following settings are not taken over, whatever their values. They affect speed, memory,
placement, logging or the order of random numbers, or verl reads them only if a refused setting is
on. A note names those that a file contains.

```text
{unused}```
"""


def render() -> str:
    """Return the complete page."""
    parts = [_INTRODUCTION, *_sections(), _MODELS, *_families(), _refused_models()]
    parts += [_aliases(), _FOREIGN.format(refused="".join(_refused()), unused="".join(_unused()))]
    return "".join(parts)


def _refused() -> Iterator[str]:
    entries = (entry for entry in foreign_settings() if not entry.ignored)
    for (reason, accepted), alike in groupby(entries, key=lambda one: (one.reason, _accepted(one))):
        names = ", ".join(f"`{entry.pattern}`" for entry in alike)
        yield f"| {names} | {accepted} | {reason} |\n"


def _accepted(entry: Foreign) -> str:
    return "those that agree" if entry.agrees is not None else entry.values or "none"


def _unused() -> Iterator[str]:
    for group, names in NOT_TAKEN_OVER.items():
        dotted = (f"{group}.{name}".lstrip(".") for name in names.split())
        yield from (f"{line}\n" for line in wrap(" ".join(dotted), 100, break_on_hyphens=False))


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
