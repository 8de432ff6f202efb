"""What becomes of the settings of verl's example scripts.

`python -m tests.verl_verdicts` writes tests/unit/config/verl/verdicts.json and the tables of
docs/from-verl.md, so that a changed verdict shows in a commit. Model, data and reward of each
script are replaced by the tiny example's; all else is read as `retrace check` reads it. Without
verl's scripts (`scripts/verl_sources.py`) the verdicts on record stay, and the page is made of
them.
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
from tests.verl_jobs import FOLDER, THERE, algorithms, examples, newest_defaults

PAGE = ROOT / "docs/from-verl.md"
VERDICTS = FOLDER / "verdicts.json"
OWN = (
    "actor_rollout_ref.model.path=examples/addition/model",
    "data.train_files=examples/addition/train.parquet",
    "data.val_files=examples/addition/val.parquet",
    "custom_reward_function.path=examples/addition/reward.py",
)
"""What replaces the script's."""
CRITIC = "critic.model.path="

TEXT = "text"
KINDS = {
    TEXT: "Megatron trains a text model, vLLM generates",
    "other training": "the same with adapters, distillation, Megatron-FSDP, DPPO or multi-token "
    "prediction",
    "other engine": "SGLang generates",
    "images": "prompts have images",
    "NPU": "for Ascend's NPUs",
    "algorithm": "FSDP or another engine trains; of its settings those of the algorithm alone",
}
"""What is replayed here is the first; the others are told, so that nobody need try them."""
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
"""What an error says of the one value."""


def settings_of(arguments: list[str]) -> list[str]:
    """The `key=value` among a script's arguments."""
    return [argument for argument in arguments if not argument.startswith("--")]


def kind_of(script: str, settings: list[str]) -> str:
    """Which of KINDS a script is."""
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
    """How many settings are accepted and how many ignored, and each refused one with the reason.

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
    # An unknown group is one error for all keys below it.
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
    """The key of a `key=value` or `+key=value`."""
    return setting.partition("=")[0].lstrip("+")


def verdicts() -> dict[str, dict[str, Any]]:
    """The verdict of each of verl's scripts, found now."""
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
    """The verdicts on record."""
    found: dict[str, dict[str, Any]] = json.loads(VERDICTS.read_text(encoding="utf-8"))
    return found


def tables() -> str:
    """The verdicts on record as the tables of docs/from-verl.md."""
    return "".join(_lines(stored_verdicts()))


def _lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| kind | scripts | with no setting refused | settings accepted | ignored | refused |\n"
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
        ("text", order[:1]),
        ("the other kinds", order[1:-1]),
        ("the kind algorithm", order[-1:]),
    ):
        yield f"\nWhat is refused, and in how many scripts of {title}:\n\n"
        yield "| key | scripts | why, and the fix |\n|---|---|---|\n"
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
    """The settings whose default differs, as a table of docs/from-verl.md."""
    verl = newest_defaults()
    rows = []
    for key in setting_keys():
        reason = OTHER_DEFAULTS.get(key.name, "")
        if key.name in {**VERL_DEFAULTS, **OTHER_DEFAULTS} and "an example's" not in reason:
            what = f"not written: {reason}" if reason else "writes verl's"
            theirs = _value(verl.get(key.name, ...))
            rows.append(f"| `{_short(key.name)}` | {theirs} | {_value(key.default)} | {what} |\n")
    return "| key | verl 0.9 | here | `import-verl` |\n|---|---|---|---|\n" + "".join(rows)


def _value(value: Any) -> str:
    if value is ...:
        return "several"
    return "null" if value is None else f"`{json.dumps(value)}`"


def imported() -> str:
    """The settings file of the page's script."""
    script = re.search(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run_qwen3_30b.sh")
        path.write_text(script[1])
        return f"```yaml\n{import_verl(path, [], {'HOME': '/home/me'})}```\n"


def render(page: str) -> str:
    """The page with its generated parts made anew, those of verl's defaults only from its files."""
    parts = {"imported": imported, "verdicts": tables}
    if THERE:
        parts["other defaults"] = other_defaults
    for name, part in parts.items():
        page = re.sub(
            rf"(?s)(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)",
            lambda marks, part=part: f"{marks[1]}\n{part()}\n{marks[2]}",
            page,
        )
    return page


if __name__ == "__main__":
    if THERE:
        content = json.dumps(verdicts(), indent=1, ensure_ascii=False) + "\n"
        VERDICTS.write_text(content, encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
