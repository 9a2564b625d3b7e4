"""Results made up for tests: the figures were never measured by anything."""

from typing import Any

from optigpu.documents.events import (
    Estimated,
    Planned,
    PlannedVariant,
    Progressed,
    VariantFinished,
    VariantStarted,
)
from optigpu.documents.result import (
    Attribution,
    AttributionRow,
    Environment,
    Gain,
    MetricSummary,
    Outcome,
    Result,
    VariantSummary,
    Verdict,
    VerdictReason,
    VerdictWarning,
)
from optigpu.documents.views import Board, History, HistoryPoint, LeaderboardRow
from optigpu.vocabulary import METRICS, DeviceKind, Role, VariantStatus, new_id, utc_now

ENVIRONMENT = Environment(
    hardware_class="2x Test CPU",
    host_id="made-up",
    cpu_model="Test CPU",
    cpu_cores=2,
    cpu_features=("avx2",),
    memory_bytes=8 * 2**30,
    os="Linux",
    software={"torch": "2.13.0"},
)
GENERATE = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64, "batch_size": 1}


def metric(name: str, value: float | None, ci: tuple[float, float] | None = None, reason: str | None = None):
    return MetricSummary(
        unit=METRICS[name].unit,
        better=METRICS[name].better,
        value=value,
        ci=ci,
        n=5,
        replicates=1,
        reason=reason,
    )


def result(index: int, role: Role, label: str, metrics: dict[str, MetricSummary], verdict: Verdict) -> Result:
    return Result(
        id=new_id(),
        created_at=utc_now(),
        variant=VariantSummary(
            index=index,
            role=role,
            label=label,
            workload=GENERATE,
            model="preset:gpt2",
            backend="torch",
            device=DeviceKind.CPU,
            stack=(),
            workload_digest="w",
            variant_digest=f"v{index}",
            primary_metric="tokens_per_s",
        ),
        verdict=verdict,
        metrics=metrics,
        environment=ENVIRONMENT,
        seed=0,
    )


def a_row(**changes: Any) -> LeaderboardRow:
    """A row of a leaderboard, as a service sends it."""
    fields: dict[str, Any] = {
        "rank": 1, "result_id": "r", "job_id": "j", "source": "worker", "measured_at": utc_now(),
        "workload": {"kind": "generate", "batch_size": 1}, "workload_digest": "w", "variant_digest": "v",
        "model": "preset:gpt2", "label": "int8_weight_only", "techniques": ("int8_weight_only",), "backend": "torch",
        "device": "cuda", "hardware": "1x Tesla T4 15 GiB", "metric": "tokens_per_s",
        "value": metric("tokens_per_s", 222.0, (220.0, 224.0)),
    }  # fmt: skip
    return LeaderboardRow.model_validate(fields | changes)


def a_board(*rows: LeaderboardRow, **changes: Any) -> Board:
    fields: dict[str, Any] = {
        "workload_digest": "w", "workload": GENERATE, "model": "preset:gpt2", "metric": "tokens_per_s", "unit": "1/s",
        "better": "higher", "rows": rows, "row_count": len(rows),
    }  # fmt: skip
    return Board.model_validate(fields | changes)


def a_point(value: float, **changes: Any) -> HistoryPoint:
    fields: dict[str, Any] = {
        "result_id": new_id(), "measured_at": utc_now(), "standing": "earlier", "value": value, "ci": None,
        "replicates": 3, "versions": {}, "warnings": (),
    }  # fmt: skip
    return HistoryPoint.model_validate(fields | changes)


def a_history(*points: HistoryPoint, **changes: Any) -> History:
    fields: dict[str, Any] = {
        "workload": {"kind": "generate"}, "model": "preset:gpt2", "label": "bf16", "backend": "torch", "device": "cpu",
        "hardware": "2x Test CPU", "metric": "tokens_per_s", "unit": "1/s", "better": "higher", "points": points,
    }  # fmt: skip
    return History.model_validate(fields | changes)


ONE_PROCESS = Verdict(valid=True, warnings=(VerdictWarning.SINGLE_REPLICATE,))
BASELINE = result(
    0,
    Role.BASELINE,
    "baseline",
    {
        "tokens_per_s": metric("tokens_per_s", 31.25, (30.75, 31.5)),
        "ttft_s": metric("ttft_s", 0.0451),
        "weight_bytes": metric("weight_bytes", 497.76e6),
    },
    ONE_PROCESS,
)
INT8 = result(
    1,
    Role.ALONE,
    "int8_weight_only",
    {
        "tokens_per_s": metric("tokens_per_s", 93.75, (92.0, 95.0)),
        "ttft_s": metric("ttft_s", None, reason="the first token came with the second"),
        "weight_bytes": metric("weight_bytes", 124.9e6),
    },
    Verdict(valid=True, warnings=(VerdictWarning.SINGLE_REPLICATE, VerdictWarning.NOT_CONVERGED)),
)
WRONG = result(
    3,
    Role.CUMULATIVE,
    "int8_weight_only + static_kv_cache",
    {"tokens_per_s": metric("tokens_per_s", 100.0), "weight_bytes": metric("weight_bytes", 124.9e6)},
    Verdict(valid=False, reasons=(VerdictReason.OUTPUT_INVALID,), notes=("The logits hold NaN.",)),
)
NO_COMPILER = "TorchInductor needs a C++ compiler."
RESULTS: list[dict[str, Any]] = [each.model_dump(mode="json") for each in (BASELINE, INT8, WRONG)]


def a_rung(index: int, label: str, role: Role = Role.ALONE, **fields: Any) -> AttributionRow:
    usual = {"index": index, "label": label, "role": role, "status": VariantStatus.SUCCEEDED}
    return AttributionRow.model_validate(usual | fields)


THREE_TIMES = Gain(ratio=3.0, ci=(2.94, 3.06), compared_with=0)
WRONG_OUTPUT = (VerdictReason.OUTPUT_INVALID,)
ATTRIBUTION = Attribution(
    metric="tokens_per_s",
    rows=(
        a_rung(0, "baseline", Role.BASELINE),
        a_rung(1, "int8_weight_only", technique="int8_weight_only", speedup=THREE_TIMES, alone=THREE_TIMES),
        a_rung(
            2,
            "torch_compile",
            status=VariantStatus.UNSUPPORTED,
            reason=NO_COMPILER,
            technique="torch_compile",
        ),
        a_rung(
            3,
            "int8_weight_only + static_kv_cache",
            Role.CUMULATIVE,
            technique="static_kv_cache",
            speedup=Gain(ratio=3.2, ci=None, compared_with=0, reasons=WRONG_OUTPUT),
            added=Gain(ratio=1.07, ci=None, compared_with=1, reasons=WRONG_OUTPUT),
        ),
    ),
    best=1,
)
EVENTS = (
    Planned(
        variants=(
            PlannedVariant(index=0, role=Role.BASELINE, label="baseline"),
            PlannedVariant(index=2, role=Role.ALONE, label="torch_compile"),
        )
    ),
    Estimated(
        seconds=100,
        limit_s=1800,
        replicates=1,
        sentence="2 variants x 1 process, about 2 min (an estimate); the limit is 30 min.",
    ),
    VariantStarted(index=0),
    Progressed(index=0, replicate=0, doing="warming up", fraction=0.25, remaining_s=60),
    Progressed(index=0, replicate=0, doing="round 1", fraction=0.5, remaining_s=40),
    VariantFinished(outcome=Outcome(index=0, status=VariantStatus.SUCCEEDED, result=BASELINE)),
    VariantFinished(outcome=Outcome(index=2, status=VariantStatus.UNSUPPORTED, reason=NO_COMPILER)),
)
