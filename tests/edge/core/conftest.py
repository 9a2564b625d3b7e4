"""What the tests of the core share."""

from pathlib import Path

import pytest

from tests.edge.interpreters import compile_all, core_files, suite_files


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the core, optimized as for the board, and its suites with their assertions."""
    folder = tmp_path_factory.mktemp("bytecode")
    compile_all(core_files(), folder, "-O2")
    compile_all(suite_files(), folder, "-O0")
    return folder
