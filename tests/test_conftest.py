"""What tests/conftest.py and tests/__main__.py promise to every other test."""

import re

import pytest

from tests.__main__ import side_by_side
from tests.conftest import ALONE, TESTS


@pytest.mark.parametrize(("gpus", "outcomes"), [(0, {"passed": 1, "deselected": 1}), (1, {"passed": 2})])
def test_a_test_that_needs_a_gpu_is_deselected_where_there_is_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, gpus: int, outcomes: dict[str, int]
) -> None:
    monkeypatch.setattr("tests.conftest.gpu_count", lambda: gpus)
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gpu\ndef test_on_a_gpu(): pass\ndef test_anywhere(): pass\n"
    )
    pytester.runpytest_inprocess().assert_outcomes(**outcomes)


@pytest.mark.parametrize("beginning", ALONE)
def test_what_runs_alone_is_there(beginning: str) -> None:
    """A test that is renamed must not come to run beside others unseen."""
    file, _, name = beginning.partition("::")
    assert (TESTS / file).exists()
    assert not name or f"def {name}(" in (TESTS / file).read_text()


def test_a_check_takes_one_case_of_each_test_and_no_server(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conftest.TESTS", pytester.path)
    monkeypatch.setattr("tests.conftest.ALONE", ("engine/test_it.py::test_timed",))
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  long\n  quick\n  together\n")
    body = (
        "import pytest\n"
        "@pytest.mark.parametrize('case', [1, 2])\ndef test_cases(case): pass\n"
        "@pytest.mark.parametrize('engine', ['sqlite', 'postgresql'])\ndef test_store(engine): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
        "@pytest.mark.long\ndef test_long(): pass\n"
        "def test_timed(): pass\n"
    )
    for folder in ("unit", "engine", "deploy"):
        (pytester.mkdir(folder) / "test_it.py").write_text(body)
    found = pytester.runpytest_inprocess("-m", "quick", "--collect-only", "-q", "--import-mode=importlib")
    assert [line for line in found.outlines if "::" in line] == [
        "engine/test_it.py::test_cases[1]",
        "engine/test_it.py::test_store[sqlite]",
        "unit/test_it.py::test_cases[1]",
        "unit/test_it.py::test_store[sqlite]",
        "unit/test_it.py::test_timed",
    ]


@pytest.mark.parametrize(
    ("possible", "outcomes"), [(False, {"passed": 1, "deselected": 3}), (True, {"passed": 4})]
)
def test_a_test_that_needs_a_server_is_deselected_where_there_is_no_way_to_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, possible: bool, outcomes: dict[str, int]
) -> None:
    """And the end of the run says what helps."""
    monkeypatch.setattr("tests.conftest.is_possible", lambda _, __: possible)
    monkeypatch.setattr("tests.conftest.may_have", lambda _, __: possible)
    pytester.makeconftest(
        "from tests.conftest import pytest_collection_modifyitems, pytest_terminal_summary\n"
        "import pytest\n"
        "@pytest.fixture\ndef redis_url(): return 'redis://made-up'\n"
        "@pytest.fixture\ndef nginx(): return '/made/up'\n"
        "@pytest.fixture(params=['sqlite', 'postgresql'])\ndef database(request): return request.param\n"
    )
    pytester.makepyfile(
        "def test_with(redis_url): pass\ndef test_on_both(database): pass\ndef test_behind(nginx): pass\n"
    )
    ran = pytester.runpytest_inprocess()
    ran.assert_outcomes(**outcomes)
    for line in ("Tests that need PostgreSQL were left out", "Tests that need nginx were left out"):
        assert (line in ran.stdout.str()) is not possible


def test_a_process_that_dies_ends_the_run_which_names_its_test(pytester: pytest.Pytester) -> None:
    """Both processes have finished several files by then."""
    pytester.makeini("[pytest]\nmarkers = together")
    beginning = "import os, pytest\npytestmark = pytest.mark.together\n"
    several = "@pytest.mark.parametrize('case', range(3))\ndef test_cases(case): pass\n"
    dying = f"{beginning}{several}def test_that_dies(): os.kill(os.getpid(), 9)\n{several.replace('cases', 'more')}"
    files = {f"test_{number}": beginning + several for number in range(20)} | {"test_12": dying}
    pytester.makepyfile(**files)
    result = pytester.runpytest_subprocess(*side_by_side("together"), timeout=100)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*crashed while running 'test_12.py::test_that_dies'*"])


def test_the_summary_says_where_a_test_whose_time_was_over_waited(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CI is set pytest does not cut its lines to the terminal's width.

    In a process of its own: beside all that a whole run has loaded, it ended the process that runs the tests, twice.
    """
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    pytester.makeconftest("from tests.conftest import pytest_runtest_makereport")
    pytester.makepyfile(
        "import time, pytest\n"
        "def wait():\n    time.sleep(60)\n"
        "@pytest.mark.timeout(0.2)\ndef test_waits():\n    wait()\n"
    )
    lines = pytester.runpytest_subprocess("-rf", timeout=100).outlines
    (told,) = (line for line in lines if line.startswith("FAILED"))
    assert re.search(r"It waited in \w+\.py:6 > \w+\.py:3\.$", told)
