"""The model's tokenizer and chat template: missing and broken files are reported."""

import shutil

import pytest

from pipeline.errors import InputError
from tests.unit.inputs.small_inputs import check, error_with_file, load, prepare, use


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be used: "),
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "refuses the prompt: no"),
    ],
)
def test_missing_or_broken_files_are_refused(settings, model, name, content, message):
    assert message in error_with_file(settings, model, name, content)


TEMPLATE = """
{%- for message in messages %}{{ message['content'] }}{% endfor -%}
{%- if enable_thinking is defined and not enable_thinking %}<no>{% endif -%}
"""
OFF = "+data.apply_chat_template_kwargs.enable_thinking=False"


def tokens(inputs):
    tables = (inputs.prompts, inputs.val_prompts)
    return [
        table.prompts.read(range(table.rows), ["token_ids"])["token_ids"].to_pylist()
        for table in tables
    ]


@pytest.fixture
def templated(settings, model):
    """The overrides of a run whose model has TEMPLATE, with validation prompts."""
    folder = settings.parent / "templated"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    val = f"data.val_files={settings.parent}/train.parquet"
    return (f"actor_rollout_ref.model.path={folder}", val)


def test_variables_reach_the_template(settings, templated):
    """They apply to training and validation prompts, and belong to the run's identity."""
    plain, off = check(settings, *templated), check(settings, *templated, OFF)
    for one, other in zip(tokens(plain), tokens(off), strict=True):
        assert all(len(a) < len(b) for a, b in zip(one, other, strict=True))
    run = prepare(load(settings, *templated, OFF))
    assert run.description.setting("data.apply_chat_template_kwargs") == {"enable_thinking": False}
    use(run.store)
    with pytest.raises(InputError, match=r"data\.apply_chat_template_kwargs: was {'enable_"):
        prepare(load(settings, *templated))
    prepare(load(settings, *templated, OFF))


def test_variables_that_the_template_does_not_read_are_noted(settings, templated):
    wrong = "+data.apply_chat_template_kwargs.enable_thinkng=False"
    [note] = [one for one in check(settings, *templated, OFF, wrong).notes if "_kwargs" in one]
    assert "enable_thinkng," in note
    assert not [one for one in check(settings, *templated, OFF).notes if "_kwargs" in one]
