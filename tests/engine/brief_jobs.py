"""Jobs that show that something works, and not how fast it is: brief, and beside whatever else is measured here."""

from collections.abc import Iterator
from typing import Any

import pytest

BRIEF: dict[str, Any] = {
    "measure": {"replicates": 1, "min_seconds": 0.05, "max_seconds": 0.5, "meters": ["latency"]},
    "limits": {"wait_for_quiet_s": 0},
}
"""The fields of such a job."""


@pytest.fixture(scope="session")
def own_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A lock of their own for jobs that are started without one, so that no other program's job is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield
