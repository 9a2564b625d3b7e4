"""What the stories stand on: a machine with the command, and a service with a worker on each database.

Nothing in them is made up: what is stored was measured by the command or by the worker, of a real model.
"""

from collections.abc import Iterator

import pytest

from optigpu.models.held import MODELS_DIR
from optigpu.paths import DATA_DIR, LOCK_DIR
from tests.engine.forked import forked_children as forked_children
from tests.journeys.machine import Machine, Station, a_station
from tests.servers.databases import fresh_database


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, forked_children: None) -> Iterator[Machine]:
    """Where the stories of a file happen: its folders for data, locks and models are theirs alone."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "models").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_DIR, str(folder))
        patch.setenv(LOCK_DIR, str(folder / "locks"))
        patch.setenv(MODELS_DIR, str(folder / "models"))
        patch.setenv("COLUMNS", "300")  # no line of a table is broken
        yield Machine(folder)


@pytest.fixture(scope="module")
def on_sqlite(machine: Machine) -> Iterator[Station]:
    with a_station(machine, f"sqlite:///{machine.folder / 'optigpu.db'}") as station:
        yield station


@pytest.fixture(scope="module")
def on_postgresql(machine: Machine, postgres_server_url: str) -> Iterator[Station]:
    with fresh_database(postgres_server_url) as url, a_station(machine, url) as station:
        yield station


@pytest.fixture(params=["sqlite", "postgresql"])
def station(request: pytest.FixtureRequest) -> Station:
    """A service with a worker; the story happens once on each database."""
    found: Station = request.getfixturevalue(f"on_{request.param}")
    return found
