"""`python -m benchmarks.threads` on a small preset, and where its weights would lie on machines of several nodes."""

import json
from pathlib import Path

import pytest

from benchmarks import threads
from benchmarks.thread_nodes import share_at_home, shares_at_home
from optigpu.ops.decode.cpu.placement import Span, pages_of
from tests.engine.random_programs import LIKE_GPT2, random_program


def test_a_small_preset_is_measured_as_far_as_this_machine_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "threads.json"
    asked = [
        "--presets",
        "tiny-llama-test",
        "--threads",
        "1",
        "2",
        "4096",
        "--turns",
        "2",
        "--new-tokens",
        "8",
    ]
    monkeypatch.setattr("sys.argv", ["threads", *asked, "--output", str(output)])
    assert threads.main() == 0
    document = json.loads(output.read_text())
    assert document["cores"] == threads.cores()
    (study,) = document["studies"]
    assert study["step"]["meets"] == 6 * 2 + 6 + 1
    # Two blocks and a tied head of 4 bits with a scale of 8 bits for 32 weights, finer rows, norms and a little cache.
    assert 360_000 * 4.25 / 8 < study["step"]["bytes"] < 360_000
    rows = {row["threads"]: row for row in study["rows"]}
    for count in (1, 2):
        row = rows[count]
        if count > threads.cores():
            assert row["tokens_per_s"] is None
            continue
        assert all(len(values) == 2 and min(values) > 0 for values in row["samples"].values())
        assert row["tokens_per_s"] > 0
        assert row["model_s"]["step"] > row["model_s"]["memory"] > 0
    assert rows[4096]["tokens_per_s"] is rows[4096]["model_s"] is None
    assert "Not measured" in rows[4096]["reason"]
    assert (rows[4096]["predicted"] is None) == (threads.cores() == 1)


def test_more_threads_than_cores_alone_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["threads", "--presets", "tiny-llama-test", "--threads", "4096"])
    assert threads.main() == 2
    assert "ask for as many --threads or fewer" in " ".join(capsys.readouterr().err.split())


def test_bytes_in_pages_of_another_node_are_not_at_home() -> None:
    reads = [Span(0, 3000, 0), Span(3000, 4096, 1), Span(10_000, 12_000, 1)]
    assert share_at_home(reads, pages_of(reads, 4096)) == pytest.approx(5000 / 6096)
    assert share_at_home(reads, reads) == 1.0


def test_smaller_pages_have_more_at_home() -> None:
    for found in shares_at_home(random_program(LIKE_GPT2, "w4")):
        small, huge = found["share_by_page_bytes"].values()
        assert 1 / found["nodes"] <= huge <= small <= 1
