"""What the pages of these tests show, made up and stored as the service would; and the address of each page."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from optigpu.documents.events import PlannedVariant
from optigpu.documents.facts import RunFacts
from optigpu.documents.peaks import Bound, Roof, RooflineFacts, RooflineStep
from optigpu.documents.result import (
    Accelerator,
    Attribution,
    AttributionRow,
    Environment,
    Gain,
    MetricSummary,
    Provenance,
    Result,
    VariantSummary,
    Verdict,
    VerdictReason,
    VerdictWarning,
)
from optigpu.documents.selftest import SelfTestSummary
from optigpu.job.spec import JobSpec, digest
from optigpu.store import jobs, leases, outcomes, withdrawals, workers
from optigpu.store.database import Database
from optigpu.store.results import Artifact
from optigpu.store.withdrawals import Withdrawal
from optigpu.vocabulary import METRICS, DeviceKind, JobState, Role, VariantStatus, new_id
from tests.service.records import a_metric, a_worker, an_outcome, fill_devices

EPYC, XEON = "1x AMD EPYC 9654 96-Core Processor", "1x Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz"
H100, RTX = "1x NVIDIA H100 80GB HBM3", "1x NVIDIA GeForce RTX 5090"
BEGAN = datetime(2026, 10, 1, 8, tzinfo=UTC)
LADDER = ("bf16", "int8_weight_only", "static_kv_cache", "torch_compile")
BITS = {"native_decode": 4, "int8_weight_only": 8}
SHAPES: dict[str, Any] = {"kind": "generate", "prompt_tokens": 128, "new_tokens": 128, "batch_size": 1}
SPEC: dict[str, Any] = {
    "workload": SHAPES,
    "model": "preset:gpt2",
    "stack": [{"name": name} for name in LADDER],
    "plan": "ladder",
}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'`"
"""A name that anybody who posts a job could choose."""
RIGHT_TO_LEFT = "\u202e\u0645\u0642\u064a\u0627\u0633\u202c 🚀 " + "very long " * 40


@dataclass(frozen=True)
class Variant:
    """One stack on one class of hardware, and its speed."""

    model: str
    hardware: str
    stack: tuple[str, ...]
    speed: float
    kld: float | None = None
    warnings: tuple[VerdictWarning, ...] = ()
    reasons: tuple[VerdictReason, ...] = ()
    at: datetime = BEGAN
    torch: str = "2.13.0"
    index: int = 0
    role: Role = Role.SINGLE
    backend: str = "torch"

    @property
    def device(self) -> DeviceKind:
        return DeviceKind.CUDA if "NVIDIA" in self.hardware else DeviceKind.CPU


@dataclass(frozen=True)
class Stored:
    """Ids of what was stored, for pages that are about one of them."""

    board: str
    ladder: str
    best: str
    baseline: str
    earlier: str
    invalid: str
    hostile: str
    withdrawn: str


def fill(database: Database) -> Stored:
    """Everything, the same each time."""
    ladder, results = _ladder(database)
    _boards(database)
    history = _history(database)
    reasons = (VerdictReason.THROTTLED, VerdictReason.OUTPUT_INVALID)
    invalid = _single(database, Variant("preset:gpt2", EPYC, ("fp16",), 31, reasons=reasons))
    hostile = _hostile(database)
    _workers(database)
    fill_devices(database)
    board = digest([SHAPES, "preset:gpt2"])
    withdrawn = _single(database, Variant("preset:gpt2", EPYC, ("fp16", "fused_attention"), 60))
    with database.write() as session:
        withdrawals.withdraw_result(
            session, withdrawn, Withdrawal(reason=HOSTILE, withdrawn_by="an operator")
        )
    return Stored(board, ladder, results[-1], results[0], history[0], invalid, hostile, withdrawn)


def result(variant: Variant, rng: random.Random, **changes: Any) -> tuple[Result, dict[str, Any]]:
    """A result and its samples: 3 processes of 40 requests."""
    samples = {
        "tokens_per_s": _samples(rng, variant.speed, 0.01),
        "ttft_s": _samples(rng, 3 / variant.speed, 0.04),
    }
    metrics = {name: _summary(name, values) for name, values in samples.items()}
    bits = next((BITS[name] for name in variant.stack if name in BITS), 16 if variant.stack else 32)
    metrics["weight_bytes"] = a_metric("weight_bytes", 124e6 * bits / 8)
    metrics["host_peak_bytes"] = a_metric("host_peak_bytes", 1.4e9)
    metrics |= _quality(variant)
    has_counter = variant.device is DeviceKind.CUDA
    metrics["j_per_token"] = (
        _spread("j_per_token", 120 / variant.speed, 0.03) if has_counter else a_metric("j_per_token", None)
    )
    workload_digest = digest([SHAPES, variant.model])
    stack = tuple({"name": name} for name in variant.stack)
    fields: dict[str, Any] = {
        "id": new_id(),
        "created_at": variant.at,
        "variant": VariantSummary(
            index=variant.index,
            role=variant.role,
            label=" + ".join(variant.stack) or "baseline",
            workload=SHAPES,
            model=variant.model,
            backend=variant.backend,
            device=variant.device,
            stack=stack,
            workload_digest=workload_digest,
            variant_digest=digest([workload_digest, stack, variant.device, variant.backend]),
            primary_metric="tokens_per_s",
        ),
        "verdict": Verdict(valid=not variant.reasons, reasons=variant.reasons, warnings=variant.warnings),
        "metrics": metrics,
        "facts": RunFacts(
            decode_loop="transformers", dtype="float32", threads=96, roofline=_roofline(variant, bits)
        ),
        "environment": _environment(variant),
        "provenance": Provenance(
            spec_digest="a" * 64,
            seed=0,
            model_revision="b" * 40,
            weight_hash="c" * 64,
            weight_hash_of="recipe",
            dataset_hash="d" * 64,
            optigpu_version="0.1.0",
            git_revision="e" * 40,
        ),
        "seed": 0,
    }
    return Result.model_validate(fields | changes), samples


def _ladder(database: Database) -> tuple[str, list[str]]:
    """A job with a baseline, each technique alone, each prefix and what the whole loses without each."""
    rng, speed, rows, made = random.Random(1), 41.0, [], []
    gains = {"bf16": 1.7, "int8_weight_only": 1.55, "static_kv_cache": 0.97, "torch_compile": 1.9}
    planned: list[tuple[Role, tuple[str, ...], float, str | None]] = [(Role.BASELINE, (), speed, None)]
    planned += [(Role.ALONE, (name,), speed * gains[name], name) for name in LADDER]
    for count in range(2, len(LADDER) + 1):
        speed_then = speed
        for name in LADDER[:count]:
            speed_then *= gains[name]
        planned.append((Role.CUMULATIVE, LADDER[:count], speed_then, LADDER[count - 1]))
    for index, (role, stack, value, technique) in enumerate(planned):
        variant = Variant("preset:gpt2", EPYC, stack, value, 0.002 * len(stack), index=index, role=role)
        made.append(result(variant, rng))
        rows.append(_row(index, role, " + ".join(stack) or "baseline", technique, value / speed, gains))
    attribution = Attribution(metric="tokens_per_s", rows=tuple(rows), best=len(rows) - 1)
    job = _job(database, SPEC, made, attribution, "The ladder of gpt2")
    return job, [each.id for each, _ in made]


def _row(
    index: int, role: Role, label: str, technique: str | None, speedup: float, gains: dict[str, float]
) -> AttributionRow:
    gain = Gain(ratio=speedup, ci=(speedup * 0.98, speedup * 1.02), compared_with=0)
    own = gains.get(technique or "", 1.0)
    bought = Gain(ratio=own, ci=(own * 0.97, own * 1.03), compared_with=max(0, index - 1))
    return AttributionRow(
        index=index,
        role=role,
        label=label,
        status=VariantStatus.SUCCEEDED,
        technique=technique,
        speedup=None if role is Role.BASELINE else gain,
        alone=bought if role is Role.ALONE else None,
        added=bought if role is Role.CUMULATIVE else None,
        left_out=bought if role is Role.ALONE else None,
    )


def _boards(database: Database) -> None:
    """Two models on four classes of hardware, a few stacks each; two of them with overlapping intervals."""
    rng = random.Random(2)
    whole = ("bf16", "fused_attention", "torch_compile")
    made: list[tuple[Result, dict[str, Any]]] = []
    for model, size in (("preset:llama-3.2-1b", 0.12), ("preset:gpt2", 1.0)):
        for hardware, fast in ((EPYC, 1.0), (XEON, 0.8), (H100, 9.0), (RTX, 8.93)):
            for stack, gain, kld, backend in (
                ((), 1.0, 0.0, "torch"),
                (("bf16",), 1.7, 0.0004, "torch"),
                (("int8_weight_only",), 2.4, 0.003, "torch"),
                (whole, 3.1, 0.0006, "torch"),
                (("native_decode",), 9.2, 0.021, "torch"),
                (("llama_flash_attention",), 6.3, 0.024, "llama_cpp"),
            ):
                of_the_ladder = (model, hardware) == ("preset:gpt2", EPYC) and gain < 3
                if of_the_ladder or (backend == "llama_cpp" and hardware in (H100, RTX)):
                    continue
                warned = (VerdictWarning.SHARED_HOST,) if hardware == XEON else ()
                variant = Variant(
                    *(model, hardware, stack, 40 * fast * size * gain, kld, warned),
                    backend=backend,
                    index=len(made),
                )
                made.append(result(variant, rng))
    _job(database, SPEC | {"plan": "single"}, made, None, None)


def _history(database: Database) -> list[str]:
    """A variant that became slower with a version of torch."""
    rng, made = random.Random(3), []
    for day in range(14):
        speed, version = (66 * 0.86, "2.13.0") if day >= 8 else (66.0, "2.12.1")
        then: dict[str, Any] = {"at": BEGAN + timedelta(days=day), "torch": version, "index": day}
        stack = ("bf16", "static_kv_cache")
        made.append(result(Variant("preset:gpt2", XEON, stack, speed, 0.0004, **then), rng))
    _job(database, SPEC | {"plan": "single"}, made, None, None)
    return [each.id for each, _ in made]


def _hostile(database: Database) -> str:
    """A result of a job whose every free string is hostile."""
    variant = Variant("path:" + HOSTILE, HOSTILE, ("bf16",), 5.0, 0.1)
    made = result(variant, random.Random(4))
    spec = {"workload": {"kind": "matmul", "sizes": [64]}, "name": HOSTILE, "note": RIGHT_TO_LEFT}
    labelled = made[0].model_copy(
        update={"variant": made[0].variant.model_copy(update={"label": HOSTILE + RIGHT_TO_LEFT})}
    )
    _job(database, spec, [(labelled, made[1])], None, HOSTILE + RIGHT_TO_LEFT)
    return labelled.id


def _single(database: Database, variant: Variant, rng: random.Random | None = None) -> str:
    made = result(variant, rng or random.Random(5))
    _job(database, SPEC | {"plan": "single"}, [made], None, None)
    return made[0].id


def _job(
    database: Database,
    spec: dict[str, Any],
    made: Sequence[tuple[Result, dict[str, Any]]],
    attribution: Attribution | None,
    reason: str | None,
) -> str:
    with database.write() as session:
        jobs.submit(session, JobSpec.model_validate(spec), fresh=True)
        lease = leases.claim(session, a_worker(models=("path:x",)), 3600)
        assert lease is not None
        plan = [
            PlannedVariant(index=each.variant.index, role=each.variant.role, label=each.variant.label)
            for each, _ in made
        ]
        outcomes.plan(session, lease, plan)
        data = b"x\x9c\xab\xae\x05\x00"
        trace = Artifact(name="trace.json", media_type="application/json", size_bytes=2, data=data)
        for each, samples in made:
            kept = each.model_copy(update={"job_id": lease.job_id})
            outcomes.save_outcome(session, lease, an_outcome(kept, samples), [trace])
        outcomes.finish(session, lease, JobState.SUCCEEDED, reason, attribution)
        return lease.job_id


def _workers(database: Database) -> None:
    tested = SelfTestSummary(
        ended_at=BEGAN, ok=61, failed=1, not_possible=4, failed_names=("int4_weight_only",)
    )
    with database.write() as session:
        alive = a_worker("epyc-1", hardware_class=EPYC, selftest=tested, packages=("llama_cpp",))
        workers.register(session, alive)
        dead = a_worker(HOSTILE, hardware_class=XEON)
        workers.register(session, dead, datetime.now(UTC) - timedelta(hours=3))


def _samples(rng: random.Random, value: float, spread: float) -> tuple[tuple[float, ...], ...]:
    centres = (value * rng.gauss(1, spread / 3) for _ in range(3))
    return tuple(tuple(centre * rng.lognormvariate(0, spread) for _ in range(40)) for centre in centres)


def _summary(name: str, samples: tuple[tuple[float, ...], ...]) -> MetricSummary:
    medians = [statistics.median(each) for each in samples]
    value, error = statistics.fmean(medians), statistics.stdev(medians)
    every = sorted(value for each in samples for value in each)
    return MetricSummary(
        unit=METRICS[name].unit,
        better=METRICS[name].better,
        value=value,
        ci=(value - 2.5 * error, value + 2.5 * error),
        freedom=2,
        n=len(every),
        replicates=3,
        per_replicate=tuple(medians),
        cv_between=error / value,
        p50=every[60],
        p90=every[108],
        p99=every[118],
    )


def _spread(name: str, value: float, share: float) -> MetricSummary:
    return a_metric(name, value, (value * (1 - share), value * (1 + share)))


def _quality(variant: Variant) -> dict[str, MetricSummary]:
    if variant.kld is None:
        return {name: a_metric(name, None) for name in ("kld_mean", "top1_agreement")}
    return {
        "kld_mean": _spread("kld_mean", variant.kld, 0.1),
        "top1_agreement": _spread("top1_agreement", max(0.0, 1 - 3 * variant.kld), 0.002),
    }


def _roofline(variant: Variant, bits: int) -> RooflineFacts:
    """A decode step reads every weight once."""
    read, flops = 124e6 * bits / 8, 2 * 124e6
    roof = Roof(source="measured", bytes_per_s=300e9, flops_per_s=4e12, array_bytes=2**28)
    return RooflineFacts(
        dtype="float32",
        step=RooflineStep(
            name="decode",
            bytes=read,
            flops=flops,
            flops_per_byte=flops / read,
            roof=roof,
            attainable_s=read / roof.bytes_per_s,
            published_s=None,
            measured_s=1 / variant.speed,
            bound=Bound.MEMORY,
        ),
    )


def _environment(variant: Variant) -> Environment:
    gpu = variant.hardware.removeprefix("1x ")
    cards = (Accelerator(name=gpu, memory_bytes=80 * 10**9, uuid="GPU-a"),)
    return Environment(
        hardware_class=variant.hardware,
        host_id="host-1",
        cpu_model=gpu if variant.device is DeviceKind.CPU else "AMD EPYC 9654",
        cpu_cores=96,
        cpu_features=("avx2", "avx512f", "avx512_vnni", "amx_int8"),
        memory_bytes=768 * 2**30,
        accelerators=cards if variant.device is DeviceKind.CUDA else (),
        driver="580.65" if variant.device is DeviceKind.CUDA else None,
        os="Linux 6.8",
        software={"torch": variant.torch, "transformers": "5.23.0", "optigpu": "0.1.0"},
    )


def paths(stored: Stored) -> dict[str, str]:
    """The address of every page without the service's."""
    return {
        "leaderboard": "/",
        "board": f"/?workload={stored.board}",
        "pareto": f"/pareto?workload={stored.board}&over=price&hardware_price=30000&kwh=0.25&watts=300",
        "result": f"/results/{stored.best}",
        "hostile": f"/results/{stored.hostile}",
        "invalid": f"/results/{stored.invalid}",
        "compare": f"/compare?result={stored.baseline}&result={stored.best}&result={stored.earlier}",
        "ladder": f"/ladder/{stored.ladder}",
        "history": f"/history?result={stored.earlier}",
        "histories": "/history",
        "claims": "/claims?verdict=implausible",
        "techniques": "/techniques?measured=true",
        "hardware": "/hardware?kind=microcontroller",
        "workers": "/workers",
        "devices": "/devices",
        "jobs": "/jobs",
        "job": f"/jobs/{stored.ladder}",
        "new_job": "/jobs/new?preset=first",
        "new_job_wrong": "/jobs/new?workload=generate&model=preset:nothing",
        "login": "/login",
        "keys": "/keys",
        "webhooks": "/webhooks",
        "alerts": f"/alerts?result={stored.best}",
        "problem": "/nothing",
    }
