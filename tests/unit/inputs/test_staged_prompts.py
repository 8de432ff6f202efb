"""A run keeps its staged prompts while the files and what determines the tokens are unchanged."""

import os
import shutil

import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.inputs import fetch
from pipeline.inputs.tokenizer import ChatTokenizer
from pipeline.run.commit import CorruptObjectError
from pipeline.run.prompt_table import SCHEMA, StoredPrompts
from tests.unit.inputs.small_inputs import (
    change_of,
    check,
    load,
    prepare,
    the_error,
    use,
    verl_rows,
    write_prompts,
)

MODEL = "actor_rollout_ref.model.path"
CLOCK = "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def no_tokens(monkeypatch):
    """Return a function after whose call nothing may be tokenised."""

    def fails(*_):
        raise AssertionError("prompts are tokenised")

    return lambda: monkeypatch.setattr(ChatTokenizer, "encode", fails)


@pytest.fixture
def dated(settings, model) -> str:
    """The setting that selects a model whose chat template reads the clock."""
    folder = settings.parent / "dated"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(CLOCK)
    return f"{MODEL}={folder}"


def test_a_start_uses_the_staged_tokens(settings, no_tokens):
    """The validation prompts have their own file; the training file has moved."""
    more = write_prompts(settings.parent / "more.parquet", verl_rows(3))
    run = prepare(load(settings, f"data.val_files={more}"))
    no_tokens()
    moved = shutil.move(settings.parent / "train.parquet", settings.parent / "moved.parquet")
    files = (f"data.val_files={more}", f"data.train_files={moved}")
    use(run.store)
    again = prepare(load(settings, *files, "trainer.total_training_steps=5"))
    assert again.description.inputs == run.description.inputs
    assert (again.prompt_count, again.val_prompt_count) == (10, 3)
    assert check(settings, *files).writes == check(settings, *files).writes


def test_a_template_that_reads_the_clock_does_not_prevent_a_start(settings, dated):
    """It is noted when prompts are staged. The tokens stay, even if the file is written again."""
    first = prepare(load(settings, dated))
    (note,) = first.notes
    assert "strftime_now" in note
    use(first.store)
    again = prepare(load(settings, dated, "trainer.total_training_steps=5"))
    assert (again.notes, change_of(again)) == ((), None)
    path = settings.parent / "train.parquet"
    pq.write_table(pq.read_table(path), path, compression="gzip", row_group_size=3)
    again = prepare(load(settings, dated))
    assert change_of(again) is None
    assert again.description.inputs == first.description.inputs
    write_prompts(path, verl_rows(11))
    assert "had 10 prompts, now 11, with different content" in the_error(settings, dated)


def test_other_tokens_of_a_newer_library_do_not_prevent_a_start(settings, monkeypatch):
    """The file, the template and tokenizer.json are the same, so the run keeps its tokens."""
    run = prepare(load(settings))
    use(run.store)
    encode = ChatTokenizer.encode
    monkeypatch.setattr(
        ChatTokenizer, "encode", lambda self, texts: [ids * 2 for ids in encode(self, texts)]
    )
    pq.write_table(pq.read_table(path := settings.parent / "train.parquet"), path, version="1.0")
    assert prepare(load(settings)).description.inputs == run.description.inputs
    short = "data.max_prompt_length=31"
    assert "data.max_prompt_length: was 32, now 31" in the_error(settings, short)


def test_a_different_template_is_refused(settings, model):
    run = prepare(load(settings))
    use(run.store)
    folder = settings.parent / "other"
    shutil.copytree(model, folder)
    template = folder / "chat_template.jinja"
    template.write_text("A" + template.read_text())
    problem = the_error(settings, f"{MODEL}={folder}")
    assert "now 10, with different tokens because of chat_template.jinja" in problem
    assert f"{MODEL}: chat_template.jinja: was SHA-256" in problem


def test_a_damaged_table_is_reported(settings):
    """The pages have checksums, and each row has its number."""
    run = prepare(load(settings))
    file = run.description.inputs.prompts
    path = settings.parent / "store/test" / file.key
    data = path.read_bytes()
    path.chmod(0o644)
    for damaged in (
        data[:100] + bytes([data[100] ^ 1]) + data[101:],
        b"PAR1" + bytes(len(data) - 4),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CorruptObjectError, match="not a table of prompts"):
            StoredPrompts.of(run.store, file).read(range(10), SCHEMA.names[1:])


def test_a_full_disk_is_reported(settings, monkeypatch):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", fails)
    assert "set TMPDIR to a larger disk" in the_error(settings)


def test_a_data_source_needs_a_scorer_also_at_a_later_start(settings):
    """The staged table names the data sources for which there was none."""
    run = prepare(load(settings))
    origin = StoredPrompts.of(run.store, run.description.inputs.prompts).origin
    path = f"{settings.parent}/train.parquet"
    assert origin is not None
    assert [tuple(source) for source in origin.unscored] == [(path, "add", 10)]
    with pytest.raises(InputError, match=r"data_source 'add' \(10\), for which there is no"):
        check(settings, "custom_reward_function=null")


def test_a_remote_file_is_fetched_only_if_it_may_have_changed(
    settings, tmp_path, monkeypatch, no_tokens
):
    """A folder takes the place of a bucket. A new time with the same content changes nothing."""
    fetched: list[str] = []
    real = fetch._fetch.__wrapped__

    def fetches(key, place, names):
        fetched.extend(names)
        return real(key, place, names)

    monkeypatch.setattr(fetch, "_fetch", fetches)
    monkeypatch.setattr(fetch, "is_remote", lambda place: place.endswith("train.parquet"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = prepare(load(settings))
    use(run.store)
    assert set(fetched) == {"train.parquet"}
    no_tokens()
    fetched.clear()
    assert change_of(prepare(load(settings))) is None
    assert fetched == []
    os.utime(settings.parent / "train.parquet", (1, 1))
    assert change_of(prepare(load(settings))) is None
    assert fetched == ["train.parquet"]
