"""The model's tokenizer and chat template: missing and broken files are reported."""

import pytest

from tests.unit.inputs.small_inputs import error_with_file


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json; create one with transformers"),
        ("tokenizer.json", "{}", "cannot be used: "),
        ("chat_template.jinja", None, "has no chat template; add chat_template.jinja"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "the model's chat template "
         "refuses the prompt: no"),
    ],
)  # fmt: skip
def test_missing_or_broken_files_are_refused(settings, model, name, content, message):
    assert message in error_with_file(settings, model, name, content)
