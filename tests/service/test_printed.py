"""What measuring processes print: the end of it is kept with the variant, for administrators alone."""

from pathlib import Path

import pytest

from optigpu.documents.events import Printed
from optigpu.store import job_views, jobs, keys, leases, outcomes
from optigpu.store.database import Database
from optigpu.store.outcomes import LONGEST_PRINTED
from optigpu.vocabulary import LeaseLostError, NotFoundError
from tests.service.browser_forms import Browser
from tests.service.records import a_plan, a_spec, a_worker
from tests.service.serving import serving
from tests.service.workers import migrated, submit, tiny_ladder, worker_context
from worker.execute import execute_next

KEY = "a-first-key-that-is-long-enough"


def test_the_end_of_all_that_a_variant_s_processes_print_is_kept(database: Database) -> None:
    with database.write() as session:
        job_id = jobs.submit(session, a_spec()).job.id
        lease = leases.claim(session, a_worker(), 30)
        assert lease is not None
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        for text in ("first\x00", "x" * (LONGEST_PRINTED - 10), "last"):
            outcomes.printed(session, lease, Printed(index=1, text=text))
        with pytest.raises(NotFoundError):
            outcomes.printed(session, lease, Printed(index=2, text="x"))
    with database.write() as session:
        leases.release(session, lease)
        with pytest.raises(LeaseLostError):
            outcomes.printed(session, lease, Printed(index=1, text="too late"))
    with database.read() as session:
        printed = job_views.printed(session, job_id)
    assert list(printed) == [1]
    assert len(printed[1]) == LONGEST_PRINTED
    assert printed[1].endswith("x\n\nlast")


@pytest.mark.slow
def test_only_an_administrator_sees_what_processes_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real processes; a library's warnings are what they print most."""
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with migrated(url) as database:
        job_id = submit(database, tiny_ladder())
        assert execute_next(worker_context(database))
        with database.write() as session:
            reader = keys.create(session, "reader", ["submit"])
        with database.read() as session:
            printed = job_views.printed(session, job_id)
        assert printed
    first = next(iter(printed.values())).splitlines()[-1]
    with serving(url, api_key=KEY) as served:
        for key, sees in ((reader, False), (KEY, True)):
            with Browser(served) as browser:
                browser.sign_in(key)
                page = browser.read(f"/jobs/{job_id}")
                assert ("What its processes printed" in page) is sees
            answer = served.client.get(
                f"/v1/jobs/{job_id}/events", headers={"Authorization": f"Bearer {key}"}
            )
            assert "printed" not in answer.text
            assert (
                first
                not in served.client.get(
                    f"/v1/jobs/{job_id}", headers={"Authorization": f"Bearer {key}"}
                ).text
            )
