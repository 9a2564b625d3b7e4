"""What is imported without being needed costs seconds and memory in every process: here it is kept out."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "triton", "tensorflow"}
SERVERS = {"sqlalchemy", "alembic", "fastapi", "starlette", "uvicorn", "celery", "redis"}


def loaded_by(*modules: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after importing `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        (
            "optigpu",
            "optigpu.job.spec",
            "optigpu.job.plan",
            "optigpu.measure",
            "optigpu.hardware",
            "optigpu.child.replicate",
            "optigpu.child.tasks",
            "optigpu.conductor.tasks",
            "optigpu.cli",
            "optigpu.client",
            "optigpu.report",
            "optigpu.report.fit",
            "optigpu.edge.convert",
            "optigpu.facade.engine",
            "optigpu.facade.deep_learning",
            "optigpu.facade.optimizers",
        ),
        ("api.app", "worker.execute", "worker.app", "worker.__main__"),
    ],
    ids=lambda modules: modules[0],
)
def test_no_deep_learning_library_is_loaded_before_it_is_used(modules: tuple[str, ...]) -> None:
    assert not HEAVY & loaded_by(*modules)


@pytest.mark.slow
def test_operators_are_measured_without_transformers() -> None:
    assert "transformers" not in loaded_by("optigpu.backends.torch.operators", "optigpu.child.replicate")


@pytest.mark.slow
def test_the_engine_needs_no_server() -> None:
    assert not SERVERS & loaded_by("optigpu", "optigpu.measure", "optigpu.child.replicate")


def test_the_package_itself_costs_nothing() -> None:
    assert "pydantic" not in loaded_by("optigpu")
