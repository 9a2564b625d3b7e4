"""Reports are kept whole, found again by name, and shown as they were."""

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from threading import Thread
from typing import TextIO

import pytest
import yaml
from typer.testing import CliRunner

from optigpu.cli import app, main
from optigpu.documents.events import VariantFinished
from optigpu.documents.result import MetricSummary, Outcome
from optigpu.documents.versions import RUN_FORMAT
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of
from optigpu.job.spec import Variant
from optigpu.measure import Report
from optigpu.runs import Keeper, KeptRun, find, folder, kept_runs, read
from optigpu.vocabulary import Better, OptiGPUError, SpecError
from tests.unit.test_attribution import job, measured


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "300")


def report(stopped: str | None = None) -> Report:
    """Of a ladder in which bf16 doubles the speed."""
    spec = job("bf16", name="A first look", tags=["paper", "zen4"])
    variants = variants_of(spec)
    outcomes = {
        each.index: with_figure(measured(each, speed), each, speed)
        for each, speed in zip(variants, (10.0, 20.0), strict=True)
    }
    return Report(
        spec=spec,
        results=tuple(outcome.result for outcome in outcomes.values() if outcome.result),
        outcomes=tuple(outcomes.values()),
        attribution=attribute(spec, variants, outcomes),
        stopped=stopped,
    )


def with_figure(outcome: Outcome, planned: Variant, speed: float) -> Outcome:
    assert outcome.result is not None
    figure = MetricSummary(unit="tokens/s", better=Better.HIGHER, value=speed, ci=(0.9 * speed, 1.1 * speed))
    variant = outcome.result.variant.model_copy(update={"workload": planned.workload.model_dump(mode="json")})
    result = outcome.result.model_copy(update={"metrics": {"tokens_per_s": figure}, "variant": variant})
    return outcome.model_copy(update={"result": result})


def kept_run() -> KeptRun:
    return Keeper().keep(report())


def shown(*arguments: str) -> str:
    made = CliRunner().invoke(app, arguments)
    assert made.exit_code == 0, made.output
    return made.output


def test_a_kept_run_is_the_report_with_its_samples() -> None:
    made = report("Ctrl-C stopped it.")
    kept = Keeper().keep(made)
    again = read(kept.path)
    assert kept.path == folder() / f"{kept.id}.json"
    assert again == kept
    assert again.results == made.document()["results"]
    assert again.attribution == made.attribution
    assert again.stopped == "Ctrl-C stopped it."
    samples = [outcome["samples"]["tokens_per_s"] for outcome in again.document["outcomes"]]
    assert samples == [[list(values) for values in each.samples["tokens_per_s"]] for each in made.outcomes]


def test_a_run_is_found_by_its_id_its_end_its_file_a_pipe_and_as_the_last(tmp_path: Path) -> None:
    first, second = kept_run(), kept_run()
    for name in (second.id, second.id[-8:], str(second.path), "last"):
        assert find(name).id == second.id
    assert find(first.id).id == first.id
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    Thread(target=pipe.write_text, args=(first.path.read_text(),), daemon=True).start()
    assert find(str(pipe)).id == first.id
    assert [each.id for each in kept_runs()] == [second.id, first.id]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("last", "No run here is called 'last'"),
        ("abc", "No run here is called 'abc'"),
        ("no such run", "No run here is called"),
        ("no.json", "no.json cannot be read: No such file or directory"),
    ],
)
def test_a_run_that_is_not_there_is_refused(name: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        find(name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no run"),
        ('{"spec": {}}', "holds no run"),
        ('{"spec": 1, "results": {}, "attribution": null}', "holds no run"),
        ('{"spec": {}, "results": [], "attribution": null}', "holds no run"),
        ('{"spec": {}, "results": [{}], "attribution": {"metric": "tflops", "rows": []}}', "holds no run"),
    ],
)
def test_a_file_that_holds_no_run_is_refused_and_not_listed(text: str, why: str) -> None:
    kept = kept_run()
    other = folder() / "00000000.json"
    other.write_text(text)
    with pytest.raises(SpecError, match=why):
        read(other)
    assert [each.id for each in kept_runs()] == [kept.id]


def test_a_run_of_a_later_version_is_refused() -> None:
    kept = kept_run()
    kept.path.write_text(json.dumps({**kept.document, "format": RUN_FORMAT + 1}))
    with pytest.raises(SpecError, match=r"was written by a later version of OptiGPU .* update OptiGPU"):
        read(kept.path)


def test_a_folder_that_cannot_be_written_is_one_sentence_and_leaves_no_half() -> None:
    folder().parent.mkdir()
    folder().write_text("a file")
    with pytest.raises(OptiGPUError, match=r"Runs cannot be kept in .*/runs \(.*\); make room"):
        kept_run()


def test_a_bundle_holds_what_a_paper_needs(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("{}")
    made = report()
    keeper = Keeper()
    for outcome in made.outcomes:
        files = {"trace.json": trace} if outcome.index == 1 else {}
        keeper.saw(VariantFinished(outcome=outcome.model_copy(update={"artifacts": files})))
    kept = keeper.keep(made)
    path = tmp_path / "bundle.zip"
    assert shown("export", kept.id, "-o", str(path)).strip() == str(path)
    fast = kept.results[1]["id"]
    with zipfile.ZipFile(path) as bundle:
        held = {name: bundle.read(name) for name in bundle.namelist()}
    assert set(held) == {
        "spec.json", "results.json", "samples.json", "environment.json", "table.md", "table.tex", "table.csv",
        "figure.svg", "figure.png", "methods.txt", "CITATION.cff", f"artifacts/{fast}/trace.json",
    }  # fmt: skip
    assert json.loads(held["results.json"])["results"] == kept.results
    assert json.loads(held["samples.json"])[fast] == kept.samples[fast]
    assert set(json.loads(held["environment.json"])) == {result["id"] for result in kept.results}
    assert b"2 variants were each measured in 3 processes of its own" in held["methods.txt"]
    assert yaml.safe_load(held["CITATION.cff"])["title"] == "OptiGPU"


@pytest.mark.slow
def test_a_bundle_that_does_not_fit_the_disk_leaves_no_half(tmp_path: Path) -> None:
    kept_run()
    path = tmp_path / "bundle.zip"
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
        "from optigpu.cli import main; sys.argv[0] = 'optigpu'; main()"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, "export", "last", "-o", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert made.returncode == 1
    assert (
        made.stderr
        == f"Error: {path} cannot be written (File too large); free space there, or name another file.\n"
    )
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("bundle")]


@pytest.mark.parametrize("form", ["table", "md", "csv"])
def test_a_name_cannot_steer_the_terminal(form: str) -> None:
    made = report("\x1b]0;stopped\x07 by a key")
    named = made.spec.model_copy(update={"name": "quick\x1b[2J\x9b1A\u202efox"})
    Keeper().keep(made.model_copy(update={"spec": named}))
    listed = shown("runs", "--format", form)
    assert "quick[2J1Afox" in listed
    again = CliRunner().invoke(app, ["show", "last", "--format", form])
    assert "]0;stopped by a key" in again.stderr
    for text in (listed, again.stdout, again.stderr):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)


@pytest.fixture
def full() -> Iterator[TextIO]:
    """A stream to a device without space."""
    with Path("/dev/full").open("wb", buffering=0) as device:
        yield io.TextIOWrapper(device, write_through=True)


@pytest.mark.parametrize("arguments", [["models"], ["models", "--format", "csv"], ["--version"], ["--help"]])
def test_output_that_cannot_be_written_is_one_sentence(
    arguments: list[str], full: TextIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with redirect_stdout(full), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "Error: The output cannot be written: No space left on device; name another place for it.\n"
    )
