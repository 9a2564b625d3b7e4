"""Reports are kept whole, found again by name, and shown as they were."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.run import Report
from optigpu.runs import FORMAT, KeptRun, find, folder, keep, kept_runs, read
from optigpu.vocabulary import OptiGPUError, SpecError
from tests.unit.test_attribution import job, measured


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "300")


def report(stopped: str | None = None) -> Report:
    """Of a ladder in which bf16 doubles the speed."""
    spec = job("bf16")
    variants = variants_of(spec)
    outcomes = {each.index: measured(each, speed) for each, speed in zip(variants, (10.0, 20.0), strict=True)}
    return Report(
        spec=spec,
        results=tuple(outcome.result for outcome in outcomes.values() if outcome.result),
        outcomes=tuple(outcomes.values()),
        attribution=attribute(spec, variants, outcomes),
        stopped=stopped,
    )


def shown(*arguments: str) -> str:
    made = CliRunner().invoke(app, arguments)
    assert made.exit_code == 0, made.output
    return made.output


def test_a_kept_run_is_the_report_with_its_samples() -> None:
    made = report("Ctrl-C stopped it.")
    kept = keep(made)
    again = read(kept.path)
    assert kept.path == folder() / f"{kept.id}.json"
    assert again == kept
    assert again.results == made.document()["results"]
    assert again.attribution == made.attribution
    assert again.stopped == "Ctrl-C stopped it."
    samples = [outcome["samples"]["tokens_per_s"] for outcome in again.document["outcomes"]]
    assert samples == [[list(values) for values in each.samples["tokens_per_s"]] for each in made.outcomes]


def test_a_run_is_found_by_its_id_its_end_its_file_and_as_the_last() -> None:
    first, second = keep(report()), keep(report())
    for name in (second.id, second.id[-8:], str(second.path), "last"):
        assert find(name).id == second.id
    assert find(first.id).id == first.id
    assert [each.id for each in kept_runs()] == [second.id, first.id]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("last", "No run here is called 'last'"),
        ("abc", "No run here is called 'abc'"),
        ("../../etc/passwd", "No run here is called"),
        ("no.json", "no.json cannot be read: No such file or directory"),
    ],
)
def test_a_run_that_is_not_there_is_refused(name: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        find(name)


def test_an_end_that_several_runs_have_is_refused() -> None:
    kept = keep(report())
    (folder() / f"0{kept.path.name}").write_text(kept.path.read_text())
    with pytest.raises(SpecError, match=f"2 runs end with '{kept.id[-8:]}'; give more of the id"):
        find(kept.id[-8:])


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not JSON"), ("[]", "holds no run"), ('{"spec": {}}', "holds no run")],
)
def test_a_file_that_holds_no_run_is_refused_and_not_listed(text: str, why: str) -> None:
    kept = keep(report())
    other = folder() / "00000000.json"
    other.write_text(text)
    with pytest.raises(SpecError, match=why):
        read(other)
    assert [each.id for each in kept_runs()] == [kept.id]


def test_a_run_of_a_later_version_is_refused() -> None:
    kept = keep(report())
    kept.path.write_text(json.dumps(kept.document | {"format": FORMAT + 1}))
    with pytest.raises(SpecError, match=r"was written by a later version of OptiGPU .* update OptiGPU"):
        read(kept.path)


def test_a_folder_that_cannot_be_written_is_one_sentence_and_leaves_no_half() -> None:
    folder().parent.mkdir()
    folder().write_text("a file")
    with pytest.raises(OptiGPUError, match=r"could not be kept in .*/runs \(.*\); free space there"):
        keep(report())


def test_a_file_of_run_json_is_a_run_too(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report().document()))
    assert isinstance(find(str(path)), KeptRun)
    assert "2.00x" in shown("show", str(path))


def test_runs_are_listed_with_what_was_best() -> None:
    assert "No run is kept" in shown("runs")
    kept = keep(report("The time limit of 10 s was reached."))
    listed = shown("runs")
    for text in (kept.id, "generate preset:gpt2", "ladder", "bf16", "The time limit of 10 s was reached."):
        assert text in listed
    (summary,) = json.loads(shown("runs", "--json"))
    assert (summary["id"], summary["best"], summary["results"]) == (kept.id, "bf16", 2)


def test_a_run_is_shown_in_every_form() -> None:
    kept = keep(report())
    day = kept.results[0]["created_at"][:10]
    assert f"Measured {day} on c; " in shown("show", "last")
    assert "| variant |" in shown("show", "last", "--format", "md")
    csv = shown("show", "last", "--format", "csv")
    assert "result_id" in csv.splitlines()[0]
    assert kept.results[1]["id"] in csv
    tex = shown("show", "last", "--format", "tex")
    assert r"\begin{tabular}{lrrrrl}" in tex
    assert r"generate preset:gpt2 128+128 x1 on c" in tex
    assert json.loads(shown("show", "last", "--format", "json")) == kept.document
