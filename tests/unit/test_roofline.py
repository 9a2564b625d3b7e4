"""Roofs, shares of them and what binds: arithmetic on figures that were never measured."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optigpu.documents.facts import (
    AttentionWork,
    Footprint,
    ImageFacts,
    ImageFootprint,
    RunFacts,
    TokenWork,
    TrainingFacts,
    WeightFacts,
)
from optigpu.documents.peaks import Bound, Peaks, ReadRate
from optigpu.hardware.catalog import Device, find
from optigpu.models.described import facts_of, known_facts, packaged
from optigpu.models.reference import parse_reference
from optigpu.roofline import NO_PEAKS, Roofline, roofline_of
from optigpu.roofline.work import decode_step, prefill, work_of
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.attention import Attention
from optigpu.workloads.base import DecodeShape, OperatorShape, Workload
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.kv_cache import KvCachePositions
from optigpu.workloads.matmul import Matmul
from optigpu.workloads.normalization import Normalization
from optigpu.workloads.prefill import Prefill
from optigpu.workloads.train_step import TrainStep
from tests.known import known
from tests.unit.made_results import metric

GIB = 2**30
SLOW, CACHED, RATE = 10e9, 40e9, 200e9
PEAKS = Peaks(
    device=DeviceKind.CPU,
    threads=2,
    measured_at=datetime(2026, 1, 1, tzinfo=UTC),
    torch="2.13.0",
    reads=(
        ReadRate(array_bytes=2**20, bytes_per_s=20e9),
        ReadRate(array_bytes=2**26, bytes_per_s=CACHED),
        ReadRate(array_bytes=2**28, bytes_per_s=SLOW),
        ReadRate(array_bytes=GIB, bytes_per_s=SLOW),
    ),
    copy_bytes_per_s=9e9,
    matmul_flops_per_s={"float32": RATE, "bfloat16": 4 * RATE, "int8": 8 * RATE, "tf32": 2 * RATE},
    reasons={"float16": "torch cannot multiply float16 here: no kernel"},
)
GPT2 = Footprint(facts=facts_of(parse_reference("preset:gpt2")), streamed_bytes=494_612_480, row_bytes=3072)  # type: ignore[arg-type]
DECODE = Generate(prompt_tokens=32, new_tokens=64)


def facts_with(
    model: Footprint = GPT2, dtype: str | None = "float32", kv_cache: str | None = "dynamic"
) -> RunFacts:
    return RunFacts(dtype=dtype, kv_cache=kv_cache, footprint=model)


def held(
    workload: Workload,
    facts: RunFacts,
    peaks: Peaks | None = PEAKS,
    published: Device | None = None,
    **figures: tuple[Any, ...],
) -> Roofline:
    """A variant of these figures, each a value that may have an interval, against the peaks."""
    metrics = {name: metric(name, *figure) for name, figure in figures.items()}
    return roofline_of(workload, metrics, facts, peaks, published)


def judged(
    tokens_per_s: float, workload: Workload = DECODE, peaks: Peaks | None = PEAKS, **changes: Any
) -> Roofline:
    rate = (tokens_per_s, (tokens_per_s * 0.9, tokens_per_s * 1.2))
    return held(workload, facts_with(**changes), peaks, tokens_per_s=rate, ttft_s=(0.2,))


def test_the_shares_and_the_headroom_follow_from_bytes_operations_and_time() -> None:
    step = work_of(DECODE, facts_with()).step
    found = judged(tokens_per_s=16.0)
    assert found.metrics["mbu"].value == pytest.approx(16 * step.bytes / SLOW)
    assert found.metrics["mfu"].value == pytest.approx(16 * step.flops / RATE)
    assert found.metrics["headroom"].value == pytest.approx(SLOW / step.bytes / 16)
    assert known(found.step).measured_s == pytest.approx(1 / 16)
    assert known(found.step).attainable_s == pytest.approx(step.bytes / SLOW)


def test_the_intervals_follow_the_rate_and_turn_round_for_the_headroom() -> None:
    found = judged(tokens_per_s=16.0).metrics
    for name in ("mbu", "mfu"):
        value, ci = found[name].value, found[name].ci
        assert known(ci) == pytest.approx((0.9 * known(value), 1.2 * known(value)))
    value, ci = found["headroom"].value, found["headroom"].ci
    assert known(ci) == pytest.approx((known(value) / 1.2, known(value) / 0.9))
    assert (found["mbu"].n, found["mbu"].replicates) == (5, 1)


@pytest.mark.parametrize(
    ("streamed", "bandwidth"),
    [(2**16, CACHED), (2**21, CACHED), (2**27, CACHED), (2**29, SLOW), (2**34, SLOW)],
)
def test_weights_that_fit_a_cache_are_held_against_the_caches_bandwidth(
    streamed: int, bandwidth: float
) -> None:
    """An array of 1 MiB was read slower than one of 64 MiB, which is the cost of starting, and no roof."""
    found = judged(16.0, model=Footprint(GPT2.facts, streamed, 0))
    assert known(found.step).roof.bytes_per_s == bandwidth


@pytest.mark.parametrize(("written", "rate"), [(2**20, 50e9), (2**26, CACHED), (2**28, 12e9), (2**30, 12e9)])
def test_what_writes_as_much_as_it_reads_is_held_against_copies_too(written: int, rate: float) -> None:
    copies = ((2**20, 50e9), (2**25, 30e9), (2**28, 12e9))
    both = PEAKS.model_copy(
        update={"copies": tuple(ReadRate(array_bytes=size, bytes_per_s=each) for size, each in copies)}
    )
    workload = Normalization(
        norms=("rms_norm",),
        residuals=(False,),
        implementations=("fused",),
        widths=(1024,),
        rows=written // 8192,
    )
    found = held(workload, RunFacts(), both, gb_per_s=(1.0,))
    assert known(found.step).roof.bytes_per_s == rate
    reading = known(judged(1.0, peaks=both, model=Footprint(GPT2.facts, written, 0)).step)
    assert reading.roof.bytes_per_s == (SLOW if written >= 2**28 else CACHED), (
        "a decode step writes next to nothing"
    )


@pytest.mark.parametrize(
    ("changes", "dtype", "rate"),
    [
        ({}, "float32", RATE),
        ({"footprint": replace(GPT2, product_dtypes=("int8",))}, "int8", 8 * RATE),
        ({"footprint": replace(GPT2, product_dtypes=("int8",)), "dtype": "bfloat16"}, "int8", 8 * RATE),
        (
            {"footprint": replace(GPT2, product_dtypes=("float32",)), "dtype": "bfloat16"},
            "bfloat16",
            4 * RATE,
        ),
        ({"autocast": "bfloat16"}, "bfloat16", 4 * RATE),
        ({"float32_matmul_precision": "high"}, "tf32", 2 * RATE),
        ({"float32_matmul_precision": "highest"}, "float32", RATE),
    ],
)
def test_the_rate_is_that_of_the_fastest_products_that_a_variant_computes(
    changes: dict[str, Any], dtype: str, rate: float
) -> None:
    facts = facts_with().model_copy(update=changes)
    found = held(DECODE, facts, tokens_per_s=(1.0,), ttft_s=(1.0,))
    assert found.dtype == dtype
    assert {known(found.step).roof.flops_per_s, known(found.prefill).roof.flops_per_s} == {rate}


def test_memory_binds_one_sequence_and_arithmetic_binds_a_large_batch() -> None:
    assert judged(20.0).bound is Bound.MEMORY
    batch = Generate(prompt_tokens=32, new_tokens=64, batch_size=64)
    step = work_of(batch, facts_with()).step
    assert step.flops / RATE > step.bytes / SLOW
    assert judged(64 * RATE / step.flops, workload=batch).bound is Bound.COMPUTE


def test_without_a_cache_the_step_is_the_whole_sequence() -> None:
    cached, uncached = judged(16.0), judged(16.0, kv_cache="none")
    assert known(uncached.step).flops > 32 * known(cached.step).flops
    assert known(uncached.step).bytes < 1.01 * known(cached.step).bytes


def test_a_matrix_product_is_counted_by_its_sides() -> None:
    product = Matmul(sizes=(1024,), dtypes=("bfloat16",))
    found = held(product, RunFacts(), tflops=(0.4, (0.3, 0.5)))
    assert (known(found.step).flops, known(found.step).bytes) == (2 * 1024**3, 3 * 1024**2 * 2)
    assert found.metrics["mfu"].value == pytest.approx(0.4e12 / (4 * RATE))
    assert found.metrics["headroom"].value == pytest.approx(2.0)
    assert found.metrics["headroom"].ci == pytest.approx((1.6, 0.8 / 0.3))
    assert found.bound is Bound.COMPUTE
    assert found.prefill is None


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_counted_by_its_pairs_and_reads_no_scores(causal: bool) -> None:
    (workload,) = Attention(
        lengths=(512,), implementations=("standard",), heads=8, kv_heads=2, causal=causal, dtype="bfloat16"
    ).expand()
    found = held(workload, RunFacts(), tflops=(0.2,))
    step = known(found.step)
    pairs = 512 * 513 / 2 if causal else 512**2
    assert step.flops == 4 * 8 * 64 * pairs
    assert step.bytes == (2 * 8 + 2 * 2) * 512 * 64 * 2
    assert step.measured_s == pytest.approx(step.flops / 0.2e12)
    assert found.metrics["mfu"].value == pytest.approx(0.2e12 / (4 * RATE))


@pytest.mark.parametrize(
    ("norm", "residual", "matrices", "vectors"),
    [("layer_norm", True, 4, 2), ("rms_norm", True, 4, 1), ("layer_norm", False, 2, 2)],
)
def test_a_norm_moves_its_rows_and_multiplies_no_matrices(
    norm: Any, residual: bool, matrices: int, vectors: int
) -> None:
    workload = Normalization(
        norms=(norm,), residuals=(residual,), implementations=("fused",), widths=(1024,), rows=4096
    )
    found = held(workload, RunFacts(), gb_per_s=(5.0, (4.0, 6.0)))
    step = known(found.step)
    assert (step.bytes, step.flops) == (4 * 1024 * (matrices * 4096 + vectors), 0)
    bandwidth = step.roof.bytes_per_s
    assert found.metrics["mbu"].value == pytest.approx(5e9 / bandwidth)
    assert found.metrics["mbu"].ci == pytest.approx((4e9 / bandwidth, 6e9 / bandwidth))
    assert found.metrics["headroom"].value == pytest.approx(bandwidth / 5e9)
    assert found.metrics["mfu"].value is None
    assert "no matrix product" in (found.metrics["mfu"].reason or "")


def test_a_token_at_a_position_is_a_decode_step_and_its_time_a_rate() -> None:
    (workload,) = KvCachePositions(positions=(512,), new_tokens=8, batch_size=4).expand()
    like = Generate(prompt_tokens=512, new_tokens=8, batch_size=4)
    times = {"tpot_s": metric("tpot_s", 0.08, (0.05, 0.1)).model_copy(update={"per_replicate": (0.07, 0.09)})}
    found = roofline_of(workload, times, facts_with(), PEAKS, None)
    step = work_of(like, facts_with()).step
    assert found.step is not None
    assert (found.step.bytes, found.step.flops) == (step.bytes, step.flops)
    assert found.step.measured_s == pytest.approx(0.08)
    shares = found.metrics["mbu"]
    assert shares.value == pytest.approx(step.bytes / 0.08 / SLOW)
    assert shares.ci == pytest.approx((step.bytes / 0.1 / SLOW, step.bytes / 0.05 / SLOW))
    assert shares.per_replicate == pytest.approx((step.bytes / 0.07 / SLOW, step.bytes / 0.09 / SLOW))
    assert found.prefill is None


def test_a_batch_of_images_reads_the_weights_once_and_each_image() -> None:
    facts = known_facts(parse_reference("preset:resnet-50"))
    assert isinstance(facts, ImageFacts)
    model = ImageFootprint(facts, streamed_bytes=51_000_000, flops=8_000_000_000, pixels=3 * 224 * 224)
    seen = RunFacts(dtype="bfloat16", footprint=model)
    found = held(Classify(batch_size=8), seen, images_per_s=(40.0,))
    step = known(found.step)
    assert (step.bytes, step.flops) == (51_000_000 + 8 * 3 * 224 * 224 * 2, 64_000_000_000)
    assert step.measured_s == pytest.approx(0.2)
    assert found.metrics["mfu"].value == pytest.approx(40 * 8e9 / (4 * RATE))
    assert found.dtype == "bfloat16"
    default = RunFacts(dtype="float32", footprint=model, cudnn_tf32=True)
    found = held(Classify(batch_size=8), default, images_per_s=(40.0,))
    assert found.dtype == "tf32", "what cuDNN computes with by default"


def test_the_catalogs_roof_stands_beside_the_measured_one() -> None:
    t4 = known(find("NVIDIA T4"))
    found = held(DECODE, facts_with(), published=t4, tokens_per_s=(16.0,), ttft_s=(0.2,))
    step = known(found.step)
    assert known(found.published).source == "NVIDIA T4"
    assert step.published_s == pytest.approx(step.bytes / 320e9)
    assert step.attainable_s == pytest.approx(step.bytes / SLOW), "the catalog replaced a measurement"
    half = held(DECODE, facts_with(dtype="bfloat16"), published=t4, tokens_per_s=(16.0,), ttft_s=(0.2,))
    assert half.published is None, "T4 has no bf16"


def missing(found: Roofline) -> str:
    """The one reason of all that is missing."""
    (reason,) = {summary.reason for summary in found.metrics.values()}
    assert [summary.value for summary in found.metrics.values()] == [None] * 3
    assert found.bound is None
    return known(reason)


def test_without_peaks_all_is_null_with_the_reason() -> None:
    found = judged(16.0, peaks=None)
    assert missing(found) == NO_PEAKS == found.reason


def test_a_dtype_that_the_machine_cannot_multiply_is_null_with_the_reason() -> None:
    assert "no kernel" in missing(judged(16.0, dtype="float16"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": None}, "the dtype of the weights: The engine does not say."),
        ({"kv_cache": None}, "the key-value cache: The engine does not say."),
        ({"footprint": None}, "what a step reads of the model: The engine does not say."),
        ({"dtype": "Q4_0"}, "how many bytes an element of Q4_0 has"),
        ({"tokens_per_pass": 2.5}, "Speculative decoding"),
    ],
)
@pytest.mark.parametrize(
    "workload", [DECODE, Prefill(prompt_tokens=8), *KvCachePositions(positions=(8,)).expand()]
)
def test_a_fact_that_is_missing_is_a_reason_and_no_error(
    workload: Workload, changes: dict[str, Any], said: str
) -> None:
    reasons = dict.fromkeys(changes, "The engine does not say.")
    facts = facts_with().model_copy(update=changes | {"reasons": reasons})
    figures: dict[str, Any] = {workload.primary: (16.0,)}
    assert said in missing(held(workload, facts, **figures))


def test_what_was_not_measured_is_a_reason_and_no_error() -> None:
    assert "tokens_per_s was not measured" in missing(held(DECODE, facts_with()))
    alone = held(DECODE, facts_with(), tokens_per_s=(16.0,))
    assert alone.step is not None
    assert alone.prefill is None


def test_a_workload_that_is_not_known_is_null_with_the_reason() -> None:
    class Dance(Workload):
        kind: str = "dance"

    assert "dance" in missing(held(Dance(), RunFacts()))


def test_an_error_of_the_roofline_s_own_ends_no_measurement() -> None:
    class Empty(Generate):
        @property
        def work_shape(self) -> Any:
            return OperatorShape("nothing", "float32", bytes=0.0, units=1.0)

    assert "ZeroDivisionError" in missing(held(Empty(), facts_with(), tokens_per_s=(16.0,)))


def test_what_is_faster_than_the_peaks_has_no_headroom_and_says_so() -> None:
    fastest = known(judged(16.0).metrics["headroom"].value)
    within, beyond = judged(16.0 * fastest * 1.04), judged(16.0 * fastest * 1.06)
    assert within.metrics["headroom"].value == pytest.approx(1 / 1.04)
    assert within.notes == ()
    assert {summary.value for summary in beyond.metrics.values()} == {None}
    assert "1.06 times as fast as the measured peaks" in (beyond.metrics["headroom"].reason or "")
    assert beyond.notes == (beyond.metrics["headroom"].reason,)
    assert beyond.step is not None
    assert beyond.step.attainable_s == pytest.approx(1.06 * known(beyond.step.measured_s))


@given(
    share=st.floats(1e-6, 1.0),
    streamed=st.integers(1, 2**40),
    batch=st.integers(1, 1024),
    prompt=st.integers(1, 512),
    new=st.integers(2, 512),
)
def test_the_nearer_roof_decides_the_headroom(
    share: float, streamed: int, batch: int, prompt: int, new: int
) -> None:
    workload = Generate(prompt_tokens=prompt, new_tokens=new, batch_size=batch)
    model = Footprint(GPT2.facts, streamed, 3072)
    step = known(judged(1e-9, workload, model=model).step)
    found = judged(share * batch / step.attainable_s, workload, model=model).metrics
    mbu, mfu, headroom = (found[name].value for name in ("mbu", "mfu", "headroom"))
    assert headroom == pytest.approx(1 / share)
    assert headroom == pytest.approx(1 / max(known(mbu), known(mfu)))


STEP = TrainStep(batch_size=4)
TRAINED = RunFacts(
    dtype="float32",
    weights=WeightFacts(bytes=400_000_000, parameters=100_000_000),
    training=TrainingFacts(model_flops=4e10, hardware_flops=5e10),
)


def of_training(samples_per_s: float, **changes: Any) -> Roofline:
    rate = (samples_per_s, (0.9 * samples_per_s, 1.1 * samples_per_s))
    return held(STEP, TRAINED.model_copy(update=changes), samples_per_s=rate)


def test_a_step_of_training_uses_its_operations_and_with_recomputation_more() -> None:
    found = of_training(samples_per_s=8.0).metrics
    assert found["mfu"].value == pytest.approx(2 * 4e10 / RATE), "two steps a second"
    assert found["hfu"].value == pytest.approx(2 * 5e10 / RATE)
    assert found["hfu"].ci == pytest.approx((0.9 * 0.5, 1.1 * 0.5))
    assert found["headroom"].value == pytest.approx(RATE / 4e10 / 2)
    assert (found["mbu"].value, found["mbu"].reason) == (
        None,
        "The bytes of activations, gradients and optimizer states are not known.",
    )


@pytest.mark.parametrize("name", [name for name, each in packaged().items() if each.facts.inner_size])
def test_the_operations_of_a_preset_follow_from_its_shapes(name: str) -> None:
    """Of matrices of attention, MLP, projections and head, and of attention; keys and values are those of all heads."""
    facts = packaged()[name].facts
    width, projected, work = facts.hidden_size, facts.embedding_size, known(facts.work)
    attention = 2 * width * facts.head_size * (facts.heads + facts.kv_heads)
    mlp = (3 if facts.gated_mlp else 2) * width * known(facts.inner_size)
    into = 0 if projected == width else width * projected
    assert work.flops == 2 * (facts.layers * (attention + mlp) + into)
    assert work.head_flops == 2 * (projected * facts.vocabulary + into)
    (layers,) = work.attention
    assert layers.flops == 4 * facts.layers * facts.heads * facts.head_size
    assert layers.kept == 2 * facts.layers * facts.kv_heads * facts.head_size


def test_layers_with_a_window_attend_to_as_many_tokens_and_others_to_all() -> None:
    facts = known(facts_of(parse_reference("preset:gpt2")))
    windows = (AttentionWork(None, flops=10, kept=3), AttentionWork(4, flops=1, kept=5))
    model = Footprint(replace(facts, work=TokenWork(100, 7, windows)), streamed_bytes=0, row_bytes=0)
    shape = DecodeShape(prompt_tokens=6, new_tokens=3, batch_size=2, units=2)
    step, ahead = (make(shape, model, "float32", cached=True) for make in (decode_step, prefill))
    assert step.attention_flops == 2 * (10 * 7.5 + 1 * 4), "the steps attend to 7 and 8 tokens"
    assert step.bytes == 2 * 4 * (3 * 7.5 + 5 * 4)
    assert step.matmul_flops == 2 * (100 + 7)
    assert ahead.attention_flops == 2 * (10 * 21 + 1 * (1 + 2 + 3 + 4 + 4 + 4))
    assert ahead.bytes == 2 * 4 * (3 * 6 + 5 * 4)
    assert ahead.matmul_flops == 2 * (6 * 100 + 7)
    uncached = decode_step(shape, model, "float32", cached=False)
    assert uncached.attention_flops == 2 * (10 * (28 + 36) / 2 + 1 * (22 + 26) / 2)
    assert uncached.bytes == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"work": None}, "The operations of gpt2 models are not known."),
        ({"work": None, "uncounted": "For a reason."}, "For a reason."),
        (
            {"work": TokenWork(1, 1, (), longest=94)},
            "The operations of gpt2 models are known for texts of at most 94 tokens: in longer ones layers choose what "
            "they attend to.",
        ),
    ],
)
def test_operations_that_are_not_known_are_a_reason(changes: dict[str, Any], said: str) -> None:
    model = replace(GPT2, facts=replace(GPT2.facts, **changes))
    found = judged(16.0, model=model)
    assert found.reason == said
    assert {each.reason for each in found.metrics.values()} == {said}
