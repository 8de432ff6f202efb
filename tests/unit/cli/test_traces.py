"""`retrace traces` on a run and on a recorded set."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from pipeline.cli.printable import printable
from pipeline.cli.traces import app
from pipeline.metrics.metric import by_layer
from pipeline.recorded import write_recorded_set
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.run.plan import publish_plan
from pipeline.store import open_store
from pipeline.traces import new_sample, seal, write_shard, write_step
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_plan,
    make_samples,
    sealed_r2,
    sealed_r3,
    train,
    without_routes,
    write_run,
)

SAMPLES = make_samples()


def command(*arguments: object, expect: int = 0) -> str:
    """Run `retrace traces` and return its output, including errors."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return result.output


@pytest.fixture(params=["R3", "R2"])
def run(request, tmp_path):
    store = open_store(str(tmp_path / "run"))
    words = Tokenizer(WordLevel({f"word{i}": i for i in range(100)}, unk_token="word0"))
    write_run(store, SAMPLES, request.param, words.to_str().encode())
    publish_plan(store, make_plan())
    (sealed_r3 if request.param == "R3" else sealed_r2)(store, SAMPLES)
    return store


def test_ls_lists_steps_and_samples(run):
    assert "000000/1/1" in command("ls", run.uri, "--step", 0)
    line = next(x for x in command("ls", run.uri).splitlines() if "vllm" in x or "megatron" in x)
    tokens = sum(len(s.tokens_S) for s in SAMPLES)
    assert [cell.strip() for cell in line.split("│")[1:3]] == ["0", "0"]
    assert f" {len(SAMPLES)} │" in line
    assert f" {tokens} │" in line


def test_show_names_the_experts_of_each_token(run, tmp_path):
    """For each position, the output shows the token, its text and its set in each layer. The last
    position has no sets."""
    sample = SAMPLES[3]
    lines = [x for x in command("show", run.uri, sample.id).splitlines() if x.startswith("│")]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert len(cells) == len(sample.tokens_S)
    for t, (token, row) in enumerate(zip(sample.tokens_S.tolist(), cells, strict=True)):
        assert row[:3] == [str(t), str(token), f"'word{token}'"]
        if t == len(sample.tokens_S) - 1:
            assert row[4:] == ["", "", ""]
        elif sample.routes.valid_T[t]:
            sets = sample.routes.sets_TLK[t].tolist()
            assert row[4:] == [" ".join(map(str, sets_K)) for sets_K in sets]
        else:
            assert row[4:] == ["not known"] * 3
    one = command("show", run.uri, sample.id, "--layer", 5)
    assert "layer 5" in one
    assert "layer 1" not in one

    # A recorded set has no tokenizer, so only token ids are shown.
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(run, record, 0)
    shown = command("show", record.uri, sample.id)
    assert f" {sample.tokens_S[0]} │" in shown
    assert "word" not in shown


def on_terminal(columns: int, *arguments: object) -> list[str]:
    """Return the lines that a command prints on a terminal of this width."""
    env = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns)}
    result = CliRunner(env=env).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return Text.from_ansi(result.output).plain.splitlines()


def test_a_terminal_gets_the_columns_that_fit(run):
    """The first layers and the important columns are shown; the output names the others. --wide
    shows all of them."""
    sample = SAMPLES[3]
    for columns, layers in ((60, ("layer 1",)), (72, ("layer 1", "layer 2"))):
        lines = on_terminal(columns, "show", run.uri, sample.id)
        assert max(len(line) for line in lines if "│" in line or "━" in line) <= columns
        [header] = [line for line in lines if "position" in line]
        assert [f"layer {i}" for i in (1, 2, 5) if f"layer {i}" in header] == list(layers)
        assert re.match(r"columns that do not fit \(\d\): layer", lines[-1])
    assert "layer 5" in "".join(on_terminal(60, "show", run.uri, sample.id, "--wide"))
    [header] = [x for x in on_terminal(72, "ls", run.uri) if "samples" in x]
    assert "engine" not in header
    assert [x for x in on_terminal(200, "ls", run.uri) if "engine" in x]


def step_of_every_kind(store) -> list:
    """Seal a step of four groups. One group is rejected, and another has a branch without a
    reward."""
    samples = make_samples(prompts=4, n=2, known=1.0)
    first = samples[4]
    branch = replace(
        first,
        id=f"{first.id}.1",
        branch_of=first.id,
        response_tokens_G=first.response_tokens_G + np.uint32(1),
        reward=None,
        reward_error="KeyError",
    )
    samples.append(branch)
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    kept = [sample for sample in samples if sample.group != "000000/1"]
    ids = [sample.id for sample in kept]
    seal(store, 0, 1, lambda _: ids, 0, rejected={"000000/1": "all rewards are equal"})
    return kept


def test_rejected_groups_untrained_samples_and_branches_are_shown(tmp_path):
    store = open_store(str(tmp_path / "run"))
    kept = step_of_every_kind(store)
    branch = kept[-1]
    assert "all good" in command("verify", store.uri)
    header, line = (
        [cell.strip() for cell in x[1:-1].replace("┃", "│").split("│")]
        for x in command("ls", store.uri).splitlines()
        if "samples" in x or "vllm" in x
    )
    shown = dict(zip(header, line, strict=True))
    assert (shown["samples"], shown["rejected groups"]) == ("7", "1")
    listed = command("ls", store.uri, "--step", 0)
    assert "000000/1/0" not in listed
    [line] = [line for line in listed.splitlines() if branch.id in line]
    assert "no reward" in line
    assert listed.count("no reward") == 1
    lines = command("show", store.uri, branch.id).splitlines()
    assert lines[1:4] == [
        f"reward    KeyError{''.join(f', {k} {v}' for k, v in branch.extras.items())}",
        f"branch of {branch.branch_of}",
        "not trained on: no reward",
    ]
    assert "branch of" not in command("show", store.uri, branch.branch_of)
    stats = command("stats", store.uri).splitlines()[0]
    assert "7 samples (1 not trained on) and 1 rejected groups, valid rows" in stats
    command("export", store.uri, "--out", tmp_path / "out")
    exported = json.loads((tmp_path / "out/000000/samples.json").read_text())["samples"]
    assert {sample["id"] for sample in exported} == {sample.id for sample in kept}


def test_show_begins_with_reward_and_texts(run):
    """The line that begins with `reward` also shows the sample's extras."""
    sample = SAMPLES[3]
    P = len(sample.prompt_tokens_P)
    prompt, response = (
        " ".join(f"word{token}" for token in tokens)
        for tokens in (sample.prompt_tokens_P, sample.response_tokens_G)
    )
    extras = "".join(f", {name} {value}" for name, value in sample.extras.items())
    assert command("show", run.uri, sample.id).splitlines()[:4] == [
        f"{sample.id}: {P} prompt and {len(sample.response_tokens_G)} response tokens, finished "
        f"by {sample.finish_reason}",
        f"reward    {sample.reward:.3f}{extras}",
        f"prompt    '{prompt}'",
        f"response  '{response}'",
    ]


def test_show_works_without_routes(tmp_path):
    store = open_store(str(tmp_path))
    write_shard(store, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(store, 0, 1, lambda _: [s.id for s in SAMPLES], 0)
    assert "layer" not in command("show", store.uri, SAMPLES[0].id)
    assert "no routes were recorded" in command("stats", store.uri, expect=2)
    assert "all good" in command("verify", store.uri)


def test_verify_reports_each_problem(run, tmp_path):
    """For an undamaged run, verify prints one line of counts and exits with 0.

    For a damaged run, it prints one line per problem, however long, and then the number of
    problems, and exits with 1.
    """
    good = command("verify", run.uri)
    assert good.startswith("all good; checked: 1 sealed steps, 6 samples, 2 inputs, ")
    assert good.count("\n") == 1
    (first, *_) = sorted((tmp_path / "run").rglob("*.routes.parquet"))
    content = bytearray(first.read_bytes())
    content[len(content) // 3] ^= 1
    first.write_bytes(content)
    for step in range(2):
        commit(run, keys.metrics(step), {"step": step, "metrics": {}}, new_write_id())
    *problems, last = command("verify", run.uri, expect=1).splitlines()
    where = first.relative_to(tmp_path / "run").as_posix()
    assert problems[0].startswith(f"{where}: SHA-256 ")
    assert problems[1:] == [
        "steps/000001/manifest.json: no such object, but the step was trained: "
        "steps/000001/metrics.json"
    ]
    assert last.startswith("problems: 2; checked: 1 sealed steps, ")


def test_verify_of_a_step_ignores_other_steps(run):
    """Verify reports a trained step without a manifest as a problem with the run, but a step that
    does not exist as the user's mistake."""
    for step in range(2):
        commit(run, keys.metrics(step), {"step": step, "metrics": {}}, new_write_id())
    assert "all good; checked: 1 sealed steps" in command("verify", run.uri, "--step", 0)
    whole = command("verify", run.uri, expect=1).splitlines()
    alone = command("verify", run.uri, "--step", 1, expect=1).splitlines()
    assert alone[:-1] == whole[:-1]
    assert alone[-1] == "problems: 1; checked: 0 sealed steps"
    assert "step 2 is not sealed" in command("verify", run.uri, "--step", 2, expect=2)


def test_stats_show_load_and_agreement(run, tmp_path):
    """The table shows the load of each layer and of all layers, and the agreement between engine
    and trainer if both recorded routes. The agreement in training comes from metrics.json. A legend
    follows the table."""
    before = command("stats", run.uri)
    assert f"of {sum(len(s.routes.valid_T) for s in SAMPLES)}" in before
    r3 = "R3:" in before
    if r3:
        run = open_store(str(tmp_path / "audited"))
        sealed_r3(run, SAMPLES, training=True)
        changed = make_samples()
        for sample in changed:
            sample.routes.sets_TLK[:, 0] = [12, 13, 14, 15]
        train(run, changed)
    shares = by_layer("replay/agreement", {1: 0.25, 2: 0.5, 5: 1.0})
    body = {"step": 0, "metrics": shares}
    commit(run, keys.metrics(0), body, new_write_id())
    printed = command("stats", run.uri).splitlines()
    assert printed[-2].startswith("load: an expert's share of the layer's choices; ")
    assert printed[-1].startswith("bytes per token and layer ")
    lines = [x for x in printed if x.startswith("│")]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert [row[0] for row in cells] == ["1", "2", "5", "all"]
    assert [row[6] for row in cells] == ["25.00%", "50.00%", "100.00%", "58.33%"]
    assert [row[5] for row in cells[1:3]] == (["100.00%"] * 2 if r3 else ["—"] * 2)
    for column, of_all in ((1, min), (2, max), (3, max)):
        loads = [float(row[column].rstrip("%")) for row in cells]
        assert loads[-1] == of_all(loads[:-1])
    valid = np.concatenate([s.routes.sets_TLK[s.routes.valid_T, 0] for s in SAMPLES])
    counts = np.bincount(valid.ravel(), minlength=16)
    loads = counts / counts.sum()
    assert cells[0][1:3] == [f"{loads.min():.2%}", f"{loads.max():.2%}"]
    if r3:
        same = (valid == [12, 13, 14, 15]).all(axis=1).mean()
        assert cells[0][5] == f"{same:.2%}"
        assert cells[3][5] == f"{(same + 2) / 3:.2%}"


@pytest.mark.parametrize("form", ["npy", "pt"])
def test_export_writes_the_documented_files(run, tmp_path, form):
    """The files have the layout that docs/trace-format.md describes."""
    out = tmp_path / "out"
    command("export", run.uri, "--out", out, "--format", form)
    index = json.loads((out / "000000/samples.json").read_text())
    assert (index["experts"], index["topk"], index["layers"]) == (16, 4, [1, 2, 5])
    assert sorted(row["id"] for row in index["samples"]) == sorted(s.id for s in SAMPLES)
    by_id = {sample.id: sample for sample in SAMPLES}
    for row in index["samples"]:
        expected = by_id[row["id"]]
        path = out / "000000" / row["file"]
        if form == "npy":
            sets, valid = np.load(path), np.load(path.with_suffix(".valid.npy"))
        else:
            torch = pytest.importorskip("torch")
            loaded = torch.load(path)
            sets, valid = loaded["sets"].numpy(), loaded["valid"].numpy()
        assert equal(type(expected.routes)(sets, valid), expected.routes)
        assert (sets.dtype, valid.dtype) == (np.uint8, np.bool_)
        assert sets.shape == (len(expected.tokens_S) - 1, 3, 4)
        assert sets.flags.c_contiguous
        assert (np.diff(sets.astype(int), axis=2) > 0).all()
        assert (sets[~valid] == np.arange(4)).all()
        assert row["file"] == f"{row['id'].replace('/', '_')}.{form}"
        assert row["tokens"] == expected.tokens_S.tolist()
        assert row["prompt_length"] == len(expected.prompt_tokens_P)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ls", "ftp://bucket/run"), "scheme 'ftp' is not known"),
        (("verify", "{empty}"), "no run there; list runs with `retrace runs ls`, or give"),
        (("ls", "{run}", "--step", 4), "step 4 is not sealed; sealed steps: [0]"),
        (("verify", "{run}", "--step", 4), "step 4 is not sealed"),
        (
            ("show", "{run}", "000000/9/0"),
            "sample 000000/9/0: not in step 0; list the ids with: retrace traces ls {run} --step 0",
        ),
        (("show", "{run}", "000007/1/0"), "step 7 is not sealed"),
        (("show", "{run}", "first"), "expected STEP/PROMPT/NUMBER, such as 000003/17/2; list"),
        (("show", "{run}", "7", "--step", 0), "SAMPLE '7': not a sample id"),
        (
            ("show", "000000/1/0", "{run}"),
            "is a sample id; give RUN first: show {run} 000000/1/0",
        ),
        (("ls", "{store}"), "a store of 1 run; pass that run: {store}/run"),
        (("verify", "{store}"), "a store of 1 run; pass that run: {store}/run"),
        (("ls", "{settings}"), "{settings}: found a settings file, expected a run; pass its run, "),
        (
            ("export", "{run}", "--out", "{store}"),
            "the folder is not empty; give a new or an empty",
        ),
        (("export", "{run}", "--out", "{file}"), "cannot write to {file}/000000: "),
        (
            ("show", "{run}", "000000/1/0", "--layer", 3),
            "no routes for layers [3], expected layers of (1, 2, 5)",
        ),
    ],
)
def test_wrong_arguments_are_named(run, tmp_path, arguments, says):
    """Each invalid argument causes one error line and exit code 2."""
    (tmp_path / "file").touch()
    (tmp_path / "my.yaml").touch()
    places = {
        "{run}": run.uri,
        "{store}": str(tmp_path),
        "{empty}": str(tmp_path / "nothing"),
        "{file}": str(tmp_path / "file"),
        "{settings}": str(tmp_path / "my.yaml"),
    }
    output = command(*(places.get(a, a) for a in arguments), expect=2)
    for name, place in places.items():
        says = says.replace(name, place)
    assert says in output
    assert output.count("\n") == 1


def test_num_layers_is_only_for_the_formats_of_verl_and_slime(run, tmp_path):
    said = command("export", run.uri, "--out", tmp_path / "npy", "--num-layers", 8, expect=2)
    assert "--num-layers" in said
    assert not (tmp_path / "npy").exists()


def test_ls_and_show_print_large_rewards_in_few_characters(tmp_path):
    store = open_store(str(tmp_path))
    huge = [replace(sample, reward=1.7e308) for sample in SAMPLES]  # their sum is infinite
    sealed_r3(store, huge)
    for arguments in (("ls", store.uri), ("ls", store.uri, "--step", 0)):
        shown = "".join(on_terminal(200, *arguments))
        assert "1.7e+308" in shown
        assert "0000" not in shown.replace("000000/", "")
    assert "reward    1.7e+308" in command("show", store.uri, SAMPLES[0].id)


def test_ids_that_look_like_markup_are_shown_verbatim(tmp_path):
    store = open_store(str(tmp_path))
    prompts = ["[red]", ":smile:", "-x", " ", "\u00e9\U0001f600", "\ufeff", "x" * 1_000]
    write_step(store, 0, [new_sample(0, name, 0, [1], [2]) for name in prompts], None, None)
    listed = command("ls", store.uri, "--step", 0)
    for name in prompts:
        id = printable(f"000000/{name}/0")
        assert id in listed
        assert id in command("show", store.uri, f"000000/{name}/0")


@pytest.mark.parametrize("audit", [True, False])
def test_a_step_that_awaits_its_training_is_not_damaged(tmp_path, audit):
    """In a healthy run in R2 mode, the newest step is sealed but not trained yet."""
    store = open_store(str(tmp_path / "run"))
    sealed_r2(store, SAMPLES)
    samples = make_samples(step=1)
    ids = [sample.id for sample in samples]
    made = samples if audit else without_routes(samples)
    source = (GEOMETRY, R3) if audit else (None, None)
    write_shard(store, 1, 0, new_write_id(), made, *source)
    seal(store, 1, 1, lambda _: ids, 0, training=True)
    line = "step 1: not trained yet, its routes are not recorded"
    assert line in command("stats", store.uri).splitlines()
    assert line in command("stats", store.uri, "--step", 1).splitlines()
    for form in ("npy", "slime"):
        out = tmp_path / form
        assert line in command("export", store.uri, "--out", out, "--format", form).splitlines()
        assert len(list(out.iterdir())) == 1
    says = command("export", store.uri, "--out", tmp_path / "one", "--step", 1, expect=2)
    assert "wait until the step is trained" in says
    commit(store, keys.metrics(1), {"step": 1, "metrics": {}}, "a")
    assert "training.json" in command("stats", store.uri, expect=1)


@pytest.mark.parametrize("place", ["a" * 300, "file:///%00"])
@pytest.mark.parametrize("name", ["ls", "verify", "stats"])
def test_places_that_no_file_can_have_are_refused(name, place):
    printed = command(name, place, expect=2)
    assert printed.startswith("error: ")
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", ["ls", "verify", "stats"])
def test_a_full_disk_behind_stdout_is_an_error(run, name):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from pipeline.cli import main; main()",
                "traces",
                name,
                run.uri,
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr.splitlines()[0] == "error: [Errno 28] No space left on device"
