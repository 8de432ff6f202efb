"""benchmarks/performance.md agrees with the programs that write it and with other pages."""

import json
import re
import subprocess
import sys

import pytest

from benchmarks import __main__ as everything
from benchmarks import codings, cores, plain_parquet, reading, traces, verifying, writing
from benchmarks.page import PAGE, Table, block, blocks_of, read_table, with_blocks
from benchmarks.ways.peers import PEERS
from tests.paths import ROOT

HEADERS = {
    "traces": traces.HEADERS,
    "limits": traces.LIMIT_HEADERS,
    "cores": cores.HEADERS,
    "codings": codings.HEADERS,
    "reading": reading.HEADERS,
    "verifying": verifying.HEADERS,
    "writing": writing.headers(10_000),
}
"""The columns of each block whose program always writes the same columns."""


def blocks() -> dict[str, str]:
    return blocks_of(PAGE.read_text())


def section(table: Table, name: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of one recording in the table of traces, keyed by format."""
    names = [row[0] for row in table.rows]
    first = next(i for i, found in enumerate(names) if found.startswith(f"**{name} ("))
    rows = {}
    for row in table.rows[first + 1 :]:
        if row[0].startswith("**"):
            break
        rows[row[0]] = row[1:]
    return rows


def test_the_page_has_the_blocks_of_all_programs_in_order():
    assert list(blocks()) == [b for program in everything.PROGRAMS.values() for b in program.blocks]


@pytest.mark.parametrize("name", HEADERS)
def test_a_block_has_the_columns_that_its_program_writes(name):
    assert read_table(blocks()[name]).headers == HEADERS[name]


def test_every_block_has_a_table_and_every_program_names_its_machine():
    for name, program in everything.PROGRAMS.items():
        texts = [blocks()[block] for block in program.blocks]
        assert all(read_table(text).rows for text in texts), name
        assert re.search(r"\d+ cores; load .*Python \d", "".join(texts)), name


def test_every_format_and_parquet_form_is_on_the_page():
    table = read_table(blocks()["traces"])
    ways = [*(peer.name for peer in PEERS), traces.FILE, traces.STORE]
    names = [row[0][2:].partition(" (E=")[0] for row in table.rows if row[0].startswith("**")]
    assert len(names) == 8
    assert all(list(section(table, name)) == ways for name in names)
    table = read_table(blocks()["plain-parquet"])
    assert list(table.headers[1:]) == names
    assert [row[0] for row in table.rows[1:]] == [form.name for form in plain_parquet.FORMS]


def test_prose_has_no_measured_rates():
    """Measured rates in prose become outdated, so they belong in a block. Rates of the compute
    model are inputs, which prose may contain."""
    page = PAGE.read_text()
    prose = re.sub(r"<!-- generated: .*?<!-- end: [a-z-]+ -->", "", page, flags=re.DOTALL)
    assert re.findall(r"\d[\d.,]* (?:MB/s|GB/s|B per token|bytes per token)", prose) == []


def test_the_page_supports_the_readmes_claim_about_bytes():
    claim = re.search(
        r"\*\*Small\*\*: ([\d.]+) bytes of routes [^.]* "
        r"compared with (\d+) to (\d+) bytes in other",
        (ROOT / "README.md").read_text(),
    )
    assert claim
    rows = section(read_table(blocks()["traces"]), "recorded")
    size = {name: float(cells[0].split()[0]) for name, cells in rows.items()}
    assert float(claim[1]) == pytest.approx(size[traces.FILE], abs=0.06)
    peers = [size[peer.name] for peer in PEERS if peer.medium != "file"]
    assert (round(min(peers)), round(max(peers))) == (int(claim[2]), int(claim[3]))


def test_the_page_supports_the_size_claimed_by_the_trace_format():
    text = (ROOT / "docs" / "trace-format.md").read_text()
    claim = re.search(r"top-8\) take ([\d.]+) bytes per token and layer", text)
    assert claim
    rows = section(read_table(blocks()["traces"]), "recorded")
    assert float(claim[1]) == pytest.approx(float(rows[traces.FILE][0].split()[0]), abs=0.06)


def test_reading_a_written_table_returns_the_same_table():
    table = Table(("", "MB/s"), (("files", "12"), ("a longer name", "3,456")))
    assert read_table(block("some words:", table, "a machine.")) == table
    with pytest.raises(ValueError, match="columns"):
        Table(("", "MB/s"), (("files",),)).markdown()
    with pytest.raises(ValueError, match="no table"):
        read_table("words")


def test_new_blocks_replace_only_the_text_between_their_marks():
    page = (
        "a\n<!-- generated: x -->\nold\n<!-- end: x -->\nb\n<!-- generated: y -->\n<!-- end: y -->"
    )
    renewed = with_blocks(page, {"x": "new\n"})
    assert renewed == page.replace("old", "new")
    assert blocks_of(renewed) == {"x": "new\n", "y": ""}
    with pytest.raises(ValueError, match="does not contain block"):
        with_blocks(page, {"z": ""})


def test_the_option_quick_refuses_to_write_the_real_page():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--quick needs --page" in done.stderr


@pytest.mark.integration
def test_one_command_updates_the_page(tmp_path):
    """The command runs every program at tiny sizes, and replaces each block with one of the same
    form."""
    page = tmp_path / "page.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--page", str(page)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = blocks_of(page.read_text())
    skipped = re.findall(r"^(\w+): skipped", done.stdout, re.MULTILINE)
    for name, program in everything.PROGRAMS.items():
        if name in skipped:
            continue
        for block_name in program.blocks:
            assert written[block_name] != blocks()[block_name]
            assert read_table(written[block_name]).rows
    assert {name: read_table(written[name]).headers for name in HEADERS if name != "writing"} == {
        name: headers for name, headers in HEADERS.items() if name != "writing"
    }


def test_a_program_that_omits_a_block_is_refused(tmp_path, monkeypatch):
    def runs(command, **_):
        (tmp_path / "cores.json").write_text(json.dumps({"core": ""}))

    monkeypatch.setattr(everything.subprocess, "run", runs)
    with pytest.raises(ValueError, match="cores wrote"):
        everything.run("cores", quick=True, folder=tmp_path)
