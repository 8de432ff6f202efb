"""The verdicts on the settings of verl's example scripts.

`python -m tests.verl_verdicts` writes tests/unit/config/verl/verdicts.json and the tables in
docs/from-verl.md, so that a changed verdict is visible in a commit. The model, data and reward of
the tiny example replace those of each script. All other settings are read as `retrace check` reads
them. The table of other defaults is generated only if verl's settings files are present (see
`scripts/verl_sources.py`).
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.imports.defaults import OTHER_DEFAULTS, VERL_DEFAULTS
from pipeline.config.imports.job import import_verl
from pipeline.config.keys import setting_keys
from pipeline.config.reading.load import load_config
from pipeline.config.reading.spellings import our_spelling
from pipeline.config.reading.verl import find_foreign
from pipeline.errors import InputError
from tests.paths import ROOT
from tests.verl_jobs import FILES, FOLDER, algorithms, examples, newest_defaults

PAGE = ROOT / "docs/from-verl.md"
VERDICTS = FOLDER / "verdicts.json"
OWN = (
    "actor_rollout_ref.model.path=examples/addition/model",
    "data.train_files=examples/addition/train.parquet",
    "data.val_files=examples/addition/val.parquet",
    "custom_reward_function.path=examples/addition/reward.py",
)
"""Settings that replace the scripts' own settings."""
CRITIC = "critic.model.path="

TEXT = "text"
KINDS = {
    TEXT: "Megatron trains a text model, and vLLM generates",
    "other training": 'like kind "text", but with adapters, distillation, Megatron-FSDP, DPPO or '
    "multi-token prediction",
    "other engine": "SGLang generates",
    "images": "prompts contain images",
    "NPU": "the script is for Ascend NPUs",
    "algorithm": "FSDP or another engine trains; only the algorithm's settings are checked",
}
"""Retrace supports the first kind. The others are listed so that users do not try them."""
_OTHER_TRAINING = {
    "actor_rollout_ref.actor.megatron.use_megatron_fsdp": "True",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "dppo_tv",
    "actor_rollout_ref.model.lora.rank": "32",
    "actor_rollout_ref.model.mtp.enable": "True",
    "distillation.enabled": "True",
}

_NAMED = re.compile(
    r"^(?P<ours>[\w.]+)(?: \(written as (?P<written>[\w.]+)\))?: (?P<text>.*)", re.S
)

_VALUE = re.compile(r"found .*?(; |, (?=expected))")
"""Matches the part of an error that repeats the value."""


def settings_of(arguments: list[str]) -> list[str]:
    """Return the `key=value` pairs among a script's arguments."""
    return [argument for argument in arguments if not argument.startswith("--")]


def kind_of(script: str, settings: list[str]) -> str:
    """Return the kind of a script, a key of KINDS."""
    values = {key_of(setting): setting.partition("=")[2] for setting in settings}
    if any(word in script for word in ("npu", "ascend")) or values.get("trainer.device") == "npu":
        return "NPU"
    if values["actor_rollout_ref.rollout.name"] != "vllm":
        return "other engine"
    if "_vl_" in script or "data.image_key" in values:
        return "images"
    other = any(values.get(key) == value for key, value in _OTHER_TRAINING.items())
    return "other training" if other else TEXT


def verdict(settings: list[str]) -> dict[str, Any]:
    """Return the numbers of accepted and ignored settings, and the refused settings with reasons.

    Example: {"accepted": 20, "ignored": 3, "refused": {"actor.strategy=fsdp": "found 'fsdp' ..."}}
    """
    keys = {key_of(setting): setting.lstrip("+") for setting in settings}
    problems: dict[str, str] = {}
    try:
        # The script's critic starts from the script's model, as its actor does.
        critic = [
            f"critic.{OWN[0].partition('.')[2]}" for one in settings if one.startswith(CRITIC)
        ]
        load_config({}, [*settings, *OWN, *critic])
    except InputError as error:
        for problem in error.problems:
            named = _NAMED.match(problem)
            assert named is not None, problem
            problems[named["written"] or named["ours"]] = named["text"]
    # An unknown group causes only one error for all keys below it.
    refused = {
        key: text
        for named, text in problems.items()
        for key in [key for key in keys if f"{key}.".startswith(f"{named}.")] or [named]
    }
    ignored = [key for key in keys if key not in refused and find_foreign(our_spelling(key))]
    return {
        "accepted": len(keys.keys() - refused.keys() - set(ignored)),
        "ignored": len(ignored),
        "refused": {keys.get(key, key): text for key, text in refused.items()},
    }


def key_of(setting: str) -> str:
    """Return the key of a `key=value` or `+key=value`."""
    return setting.partition("=")[0].lstrip("+")


def verdicts() -> dict[str, dict[str, Any]]:
    """Compute the verdict on each of verl's scripts."""
    of_megatron = {
        script: {"kind": kind_of(script, settings)} | verdict(settings)
        for script, arguments in examples().items()
        for settings in [settings_of(arguments)]
    }
    return of_megatron | {
        script: {"kind": "algorithm"} | verdict(settings)
        for script, settings in algorithms().items()
    }


def stored_verdicts() -> dict[str, dict[str, Any]]:
    """Return the stored verdicts."""
    found: dict[str, dict[str, Any]] = json.loads(VERDICTS.read_text(encoding="utf-8"))
    return found


def tables() -> str:
    """Return the stored verdicts as the tables for docs/from-verl.md."""
    return "".join(_lines(stored_verdicts()))


def _lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| kind | scripts | without refusals | settings accepted | ignored | refused |\n"
    yield "|---|---|---|---|---|---|\n"
    for kind, meaning in KINDS.items():
        these = [one for one in found.values() if one["kind"] == kind]
        yield (
            f"| {kind}: {meaning} | {len(these)} | {sum(not one['refused'] for one in these)} "
            f"| {sum(one['accepted'] for one in these):,} "
            f"| {sum(one['ignored'] for one in these):,} "
            f"| {sum(len(one['refused']) for one in these)} |\n"
        )
    yield "\n| script | kind | accepted | ignored | refused | refused keys |\n"
    yield "|---|---|---|---|---|---|\n"
    order = list(KINDS)
    for script, one in sorted(found.items(), key=lambda item: order.index(item[1]["kind"])):
        if one["kind"] == "algorithm":
            continue
        refused = one["refused"]
        keys = ", ".join(f"`{_short(key_of(setting))}`" for setting in refused)
        yield (
            f"| {script.removeprefix('examples/')} | {one['kind']} | {one['accepted']} "
            f"| {one['ignored']} | {len(refused)} | {keys} |\n"
        )
    for title, kinds in (
        ('kind "text"', order[:1]),
        ("the other kinds", order[1:-1]),
        ('kind "algorithm"', order[-1:]),
    ):
        yield f"\nRefused keys in scripts of {title}:\n\n"
        yield "| key | scripts | reason and fix |\n|---|---|---|\n"
        scripts = Counter(
            (key_of(setting), _VALUE.sub("", text))
            for one in found.values()
            if one["kind"] in kinds
            for setting, text in one["refused"].items()
        )
        for (key, text), count in sorted(scripts.items(), key=lambda item: (-item[1], item[0])):
            yield f"| `{_short(key)}` | {count} | {text.replace('|', chr(92) + '|')} |\n"


def _short(key: str) -> str:
    return key.removeprefix("actor_rollout_ref.")


def other_defaults() -> str:
    """Return the settings whose defaults differ from verl's, as a table for docs/from-verl.md."""
    verl = newest_defaults()
    rows = []
    for key in setting_keys():
        reason = OTHER_DEFAULTS.get(key.name, "")
        if key.name in {**VERL_DEFAULTS, **OTHER_DEFAULTS} and "an example" not in reason:
            what = f"not written: {reason}" if reason else "writes verl's default"
            theirs = _value(verl.get(key.name, ...))
            rows.append(f"| `{_short(key.name)}` | {theirs} | {_value(key.default)} | {what} |\n")
    return "| key | verl 0.9 | here | `import-verl` |\n|---|---|---|---|\n" + "".join(rows)


def _value(value: Any) -> str:
    if value is ...:
        return "several"
    return "null" if value is None else f"`{json.dumps(value)}`"


def imported() -> str:
    """Return the settings file that `import-verl` writes for the page's script."""
    script = re.search(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run_qwen3_30b.sh")
        path.write_text(script[1])
        return f"```yaml\n{import_verl(path, [], {'HOME': '/home/me'})}```\n"


def render(page: str) -> str:
    """Return the page with newly generated parts; the part on defaults needs verl's YAML files."""
    parts = {"imported": imported, "verdicts": tables}
    if FILES:
        parts["other defaults"] = other_defaults
    for name, part in parts.items():
        page = re.sub(
            rf"(?s)(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)",
            lambda marks, part=part: f"{marks[1]}\n{part()}\n{marks[2]}",
            page,
        )
    return page


if __name__ == "__main__":
    content = json.dumps(verdicts(), indent=1, ensure_ascii=False) + "\n"
    VERDICTS.write_text(content, encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
