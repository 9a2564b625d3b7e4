"""What a measurement leaves behind cannot contradict itself."""

import pytest
from pydantic import ValidationError

from optigpu.documents.result import Environment, Measurement, Outcome, Verdict, VerdictReason
from optigpu.vocabulary import VariantStatus

HERE = Environment(hardware_class="c", host_id="h", cpu_model="m", cpu_cores=2, memory_bytes=1, os="o")


def test_a_measurement_has_samples_or_a_reason() -> None:
    assert Measurement(name="load_s", samples=((1.0,), ())).unit == "s"
    assert Measurement(name="load_s", reason="nothing was loaded").samples == ()
    for empty in ((), ((),), ((), ())):
        with pytest.raises(ValidationError, match="needs samples, or the reason"):
            Measurement(name="load_s", samples=empty)


def test_a_verdict_is_valid_exactly_when_nothing_speaks_against_it() -> None:
    assert Verdict(valid=True).reasons == ()
    for valid, reasons in ((True, (VerdictReason.OUTPUT_INVALID,)), (False, ())):
        with pytest.raises(ValidationError, match="no reasons"):
            Verdict(valid=valid, reasons=reasons)


def test_an_outcome_has_either_a_result_or_a_reason() -> None:
    assert Outcome(index=0, status=VariantStatus.FAILED, reason="it broke").result is None
    with pytest.raises(ValidationError, match="either a result or a reason"):
        Outcome(index=0, status=VariantStatus.SUCCEEDED)
