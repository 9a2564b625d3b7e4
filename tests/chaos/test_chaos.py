"""A short form of `make chaos`: each fault once, and fewer jobs."""

from pathlib import Path

import pytest

from tests.chaos.story import Plan, chaos, faults

pytestmark = pytest.mark.long


def test_every_accepted_job_ends_once_whatever_breaks(tmp_path: Path) -> None:
    plan = Plan(jobs=30, every_s=0.6, rounds=1, pause_s=0.5, cut_s=2.0, seed=1)
    account = chaos(plan, tmp_path)
    assert account.wrong == []
    assert len(account.accepted) >= plan.jobs
    assert account.injected == {fault.name: 1 for fault in faults(plan.cut_s)}
    assert account.states["succeeded"] > len(account.accepted) / 2
    assert account.attempts["lost"] > 0
