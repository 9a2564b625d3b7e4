"""What the next attempt of a job goes on from: the outcomes of the same device, host and version, and no others."""

from datetime import timedelta

import pytest

from optigpu.store import jobs, leases, outcomes, results
from optigpu.store.database import Database
from optigpu.store.workers import WorkerInfo
from optigpu.vocabulary import DeviceKind, VariantStatus, utc_now
from tests.service.records import a_gpu_worker, a_plan, a_result, a_spec, a_worker, an_outcome

LATER = timedelta(hours=1)
FIRST = a_worker("first")
FIRST_GPU = a_gpu_worker("first")


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        pytest.param(FIRST, a_worker("second"), True, id="same CPU"),
        pytest.param(FIRST, a_worker("second", host_id="host-2"), False, id="another host"),
        pytest.param(FIRST, a_worker("second", version="0.2.0"), False, id="another version"),
        pytest.param(FIRST, a_worker("second", hardware_class="Test CPU 2 cores"), False, id="fewer cores"),
        pytest.param(FIRST_GPU, a_gpu_worker("second"), True, id="same GPU"),
        pytest.param(FIRST_GPU, a_gpu_worker("second", gpu_uuid="GPU-b"), False, id="another GPU"),
        pytest.param(
            FIRST_GPU.model_copy(update={"gpu_uuid": "MIG-a"}), FIRST_GPU, False, id="part of the same GPU"
        ),
    ],
)
def test_a_job_resumes_only_on_the_same_device(
    database: Database, first: WorkerInfo, second: WorkerInfo, kept: bool
) -> None:
    """Elsewhere the earlier outcomes are dropped: a ladder must not compare two devices."""
    with database.write() as session:
        job_id = jobs.submit(session, a_spec(device=first.device)).job.id
        lease = leases.claim(session, first, 30)
        assert lease is not None
        outcomes.plan(session, lease, a_plan("baseline", "bf16"))
        outcomes.save_outcome(session, lease, an_outcome(a_result(device=first.device)))
        leases.sweep(session, now=utc_now() + LATER)
        again = leases.claim(session, second, 30)
        assert again is not None
        outcomes.plan(session, again, a_plan("baseline", "bf16"))
        statuses = [variant.status for variant in jobs.get(session, job_id).variants]
        found = results.of_job(session, job_id)
    baseline = VariantStatus.SUCCEEDED if kept else VariantStatus.PENDING
    assert again.done == ((0,) if kept else ())
    assert statuses == [baseline, VariantStatus.PENDING]
    assert len(found) == kept


def test_what_a_third_device_measures_is_not_mixed_with_the_first(database: Database) -> None:
    """A, then B, then A again: what A measured was dropped when B began, so it does not come back."""
    with database.write() as session:
        job_id = jobs.submit(session, a_spec(device="cuda")).job.id
        for gpu in ("GPU-a", "GPU-b", "GPU-a"):
            lease = leases.claim(session, a_gpu_worker(gpu_uuid=gpu), 30)
            assert lease is not None
            assert lease.done == ()
            outcomes.plan(session, lease, a_plan("baseline"))
            outcomes.save_outcome(session, lease, an_outcome(a_result(device=DeviceKind.CUDA)))
            leases.release(session, lease)
        assert len(results.of_job(session, job_id)) == 1
