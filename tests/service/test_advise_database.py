"""`optigpu advise` answers from this machine's database, without a service."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import migrations
from optigpu.cli import app
from optigpu.documents.result import Result
from optigpu.hardware import hardware_class, probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.store import results, standings
from optigpu.store.database import Database, default_url
from optigpu.vocabulary import DeviceKind, utc_now
from tests.service.records import a_metric, a_result

SPEC = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "bundled:tiny", "device": "cpu"})
HERE = probe()


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory without anything in it, on a machine without a GPU."""
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("OPTIGPU_DATABASE_URL", raising=False)
    monkeypatch.setattr("optigpu.cli.advise.default_device", lambda: DeviceKind.CPU)
    return tmp_path


def advised(*more: str) -> tuple[dict[str, Any], str]:
    made = CliRunner().invoke(app, ["advise", "--model", "bundled:tiny", "--format", "json", *more])
    assert made.exit_code == 0, made.output
    return json.loads(made.stdout), made.stderr


def measured_here(value: float, *stack: str, **changes: Any) -> Result:
    """A result of the command's workload on this machine, three days old."""
    found = a_result(
        {"tokens_per_s": a_metric("tokens_per_s", value), "kld_mean": a_metric("kld_mean", 0.01)},
        stack=stack,
        model=str(SPEC.model),
        hardware=hardware_class(HERE, DeviceKind.CPU),
        software=HERE.software,
        measured_at=utc_now() - timedelta(days=3),
        **changes,
    )
    planned = variants_of(SPEC)[0]
    variant = found.variant.model_copy(
        update={"workload": SPEC.workload.model_dump(), "workload_digest": planned.workload_digest}
    )
    return found.model_copy(update={"variant": variant})


def keep(url: str, *found: Result) -> None:
    migrations.upgrade(url)
    database = Database(url)
    with database.write() as session:
        for result in found:
            results.add(session, result, {})
            standings.enter(session, result)
    database.close()


def test_the_best_valid_row_of_the_database_answers_with_its_age(data_dir: Path) -> None:
    best = measured_here(200.0, "int8_weight_only")
    keep(
        default_url(data_dir),
        measured_here(100.0),
        best,
        measured_here(999.0, "bf16", valid=False),
    )
    advice, said = advised("--max-kld", "0.02")
    assert (advice["basis"], advice["evidence"]["result_id"]) == ("measured", best.id)
    assert advice["evidence"]["where"] == "the database of this machine"
    assert advice["age_s"] == pytest.approx(3 * 86400, rel=0.01)
    assert "The best of 2 valid results" in advice["reason"]
    assert said == ""


@pytest.mark.slow
def test_the_variable_names_another_database(
    data_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('other') / 'results.db'}"
    keep(url, measured_here(100.0, "bf16"))
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", url)
    assert advised()[0]["label"] == "bf16"


def test_where_there_is_no_database_none_is_made(data_dir: Path) -> None:
    advice, said = advised()
    assert advice["basis"] == "predicted"
    assert said == ""
    assert not list(data_dir.iterdir())


def test_a_database_that_cannot_be_read_is_named_and_costs_no_answer(data_dir: Path) -> None:
    (data_dir / "optigpu.db").write_bytes(b"this is no database" * 100)
    advice, said = advised()
    assert advice["basis"] == "predicted"
    assert said.startswith("The local database was not asked. The database sqlite:///")
