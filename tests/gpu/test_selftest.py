"""The self-test on an NVIDIA GPU: nothing fails, and the paths of CUDA are among what ran."""

from pathlib import Path

import pytest

from optigpu.conductor.selftest import SelfTester
from optigpu.documents.selftest import CheckStatus
from optigpu.vocabulary import DeviceKind

pytestmark = [pytest.mark.gpu]


@pytest.mark.timeout(1200)
def test_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    tester = SelfTester(lambda: None, lambda _: None, lambda _: None)
    (outcome,) = tester.run(tester.checks((), DeviceKind.CUDA))
    assert [(result.check.label, result.reason) for result in outcome.failed] == []
    ok = {result.check.name for result in outcome.results if result.status is CheckStatus.OK}
    assert {
        "unmodified model",
        "decode_step_w3k",
        "decode_step_w4",
        "decode_step_w4k",
        "cuda_graphs",
        "cpu_offload",
        "native_decode",
        "profile",
    } <= ok
