"""What a process says against what is seen from outside, on made-up replicates: each finding on both sides of its line.

tests/engine/test_tampering.py provokes them with processes that cheat.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optigpu.backends.runtime import Generation, Ids, Logits, Pass
from optigpu.child.messages import Audited, Metered
from optigpu.conductor.processes.rounds import MeterReading, Pause, Replicate
from optigpu.documents.facts import RunFacts, WeightFacts
from optigpu.documents.result import OF_THE_OUTPUT, VerdictReason
from optigpu.job.spec import JobSpec
from optigpu.workloads.quality import ScoringRequest
from optigpu.workloads.requests import CHECKED_S, DecodingRequest, PassRequest, checked_places
from tests.unit.made_replicates import QUIET, REQUESTS, ROUNDS, replicate, samples, spec, verdict

ROUND_S = 0.02 * REQUESTS
HONEST = replicate()


def told(*, share: float = 1.0, outside_s: float = ROUND_S + 0.01, **changes: Any) -> Replicate:
    """A replicate whose requests are said to have taken this share of what their latencies say."""
    request_s = tuple(share * each for each in HONEST.samples["latency_s"])
    return replace(HONEST, request_s=request_s, outside_s=(outside_s,) * ROUNDS, **changes)


def with_facts(**facts: Any) -> Replicate:
    """A replicate whose process noted these facts."""
    return replace(HONEST, ready=HONEST.ready.model_copy(update={"facts": RunFacts(**facts)}))


def reasons(made: Replicate, job: JobSpec | None = None) -> tuple[VerdictReason, ...]:
    return verdict(made, job=job).reasons


def a_job(*stack: str, **changes: Any) -> JobSpec:
    document = {"workload": {"kind": "generate"}, "model": "path:trained", "plan": "single"}
    return JobSpec.model_validate(document | {"stack": [{"name": name} for name in stack]} | changes)


def of_quality(made: Replicate, **values: float) -> Replicate:
    return replace(made, readings=(MeterReading(Metered(meter="quality", values=values)),))


@pytest.mark.parametrize(
    ("made", "is_found"),
    [
        (told(), False),
        (told(outside_s=ROUND_S + 0.15), False),
        (told(outside_s=2 * ROUND_S), True),
        (told(outside_s=0.8 * ROUND_S), True),
        (told(outside_s=2 * ROUND_S, host_samples=(replace(QUIET, foreign_s=0.6),) * ROUNDS), False),
        (told(share=1.3, outside_s=1.3 * ROUND_S), False),
        (told(share=2.0, outside_s=2.0 * ROUND_S), True),
        (replace(told(), outside_s=(ROUND_S, ROUND_S, ROUND_S, 9.0)), False),
    ],
    ids=[
        "honest",
        "long messages",
        "a slow clock",
        "a fast clock",
        "who waits for a core that others have",
        "inputs are copied before the clock runs",
        "half of the work comes after the clock stopped",
        "a process that was stopped once",
    ],
)
def test_times_that_contradict_each_other_are_found_where_nothing_else_explains_them(
    made: Replicate, is_found: bool
) -> None:
    assert (VerdictReason.CLOCK_CONTRADICTED in reasons(made)) == is_found


def test_a_server_elsewhere_may_take_its_time_between_requests() -> None:
    job = a_job(model="preset:gpt2", backend="endpoint", endpoint="http://127.0.0.1:9/v1#m")
    assert VerdictReason.CLOCK_CONTRADICTED not in reasons(told(outside_s=2 * ROUND_S), job)


@pytest.mark.parametrize(
    ("threads", "pause", "is_found"),
    [
        (1, Pause(3.0, 0.05), False),
        (1, Pause(3.0, 0.4), True),
        (4, Pause(3.0, 0.7), False),
        (4, Pause(3.0, 2.9), True),
        (1, Pause(0.4, 0.2), False),
    ],
    ids=["rests", "works", "threads that spin for a moment", "works as well", "too little to tell"],
)
def test_work_of_a_process_that_is_asked_nothing_is_found(threads: int, pause: Pause, is_found: bool) -> None:
    made = replace(with_facts(threads=threads), pauses=(pause,))
    assert (VerdictReason.WORKED_WHILE_IDLE in reasons(made)) == is_found
    if is_found:
        assert verdict(made, job=spec("cuda")).valid, "a driver of a GPU works whenever it likes"


@pytest.mark.parametrize(
    ("idle_s", "slowness", "rounds_idle_s", "is_found"),
    [
        (3.9, 5.0, 1.0, True),
        (2.1, 5.0, 1.0, False),
        (3.9, 1.0, 1.0, False),
        (3.9, 5.0, 2.4, False),
    ],
    ids=["slept", "one core worked", "one request was stopped", "it always waits"],
)
def test_a_warm_up_that_slept_is_found(
    idle_s: float, slowness: float, rounds_idle_s: float, is_found: bool
) -> None:
    made = told(host_samples=(replace(QUIET, idle_s=rounds_idle_s),) * ROUNDS)
    ready = made.ready.model_copy(update={"request_s": 0.02 * slowness})
    warm_up = replace(QUIET, wall_s=2.0, idle_s=idle_s)
    judged = reasons(replace(made, ready=ready, warm_up=warm_up))
    assert (VerdictReason.WARM_UP_SLEPT in judged) == is_found


def test_a_part_that_was_replaced_is_named_once() -> None:
    audit = Audited(samples=samples([0.021] * 3), replaced=("time.perf_counter",))
    metered = Metered(meter="energy", values={"energy_j": 1.0}, replaced=("time.perf_counter", "time.time"))
    judged = verdict(replace(HONEST, audit=audit, readings=(MeterReading(metered),)))
    assert judged.reasons == (VerdictReason.HARNESS_REPLACED,)
    assert "time.perf_counter, time.time was replaced during replicate 3" in judged.notes[0]


@pytest.mark.parametrize(
    ("stack", "dtypes", "is_found"),
    [
        ([], ("float32",), False),
        ([], ("bfloat16", "float32"), True),
        (["static_kv_cache"], ("float16",), True),
        (["bf16"], ("bfloat16", "float32"), False),
        ([], None, False),
    ],
)
def test_fewer_bits_than_the_stack_says_are_found(
    stack: list[str], dtypes: tuple[str, ...] | None, is_found: bool
) -> None:
    made = with_facts(product_dtypes=dtypes)
    assert (VerdictReason.UNDECLARED_ROUNDING in reasons(made, a_job(*stack))) == is_found


@pytest.mark.parametrize(
    ("stack", "facts", "kld", "is_found"),
    [
        ([], {}, 9e-6, False),
        ([], {}, 2e-05, True),
        ([], {}, None, False),
        (["static_kv_cache", "fused_attention", "torch_compile"], {}, 2e-5, True),
        (["eager_attention"], {}, 2.5, True),
        (["static_kv_cache", "int8_weight_only"], {}, 2.5, False),
        (["sliding_kv_cache"], {}, 2.5, False),
        ([], {"dtype": "bfloat16"}, 2.5, False),
        ([], {"cudnn_tf32": True}, 2.5, False),
    ],
)
def test_predictions_of_another_model_are_found_where_nothing_rounds(
    stack: list[str], facts: dict[str, Any], kld: float | None, is_found: bool
) -> None:
    values = {} if kld is None else {"kld_mean": kld}
    judged = verdict(of_quality(with_facts(**{"dtype": "float32"} | facts), **values), job=a_job(*stack))
    assert (VerdictReason.NOT_THE_MODEL in judged.reasons) == is_found
    assert any(f"diverged by {kld} nat" in note for note in judged.reason_notes) == is_found


@pytest.mark.parametrize("engine", ["llama_cpp", "onnxruntime", "openvino", "vllm"])
def test_another_model_is_found_in_every_engine(engine: str) -> None:
    made = of_quality(with_facts(dtype="float32"), kld_mean=0.03)
    assert VerdictReason.NOT_THE_MODEL in reasons(made, a_job(backend=engine))


@pytest.mark.parametrize(("quantized", "is_found"), [(0.99, False), (None, True)])
def test_a_file_of_few_bits_rounds_without_a_technique(quantized: float | None, is_found: bool) -> None:
    facts = with_facts(dtype="float32", weights=WeightFacts(quantized=quantized))
    judged = reasons(of_quality(facts, kld_mean=0.01), a_job(model="path:trained.gguf", backend="llama_cpp"))
    assert (VerdictReason.NOT_THE_MODEL in judged) == is_found


@pytest.mark.parametrize(("ran", "is_found"), [(True, False), (None, False), (False, True)])
def test_a_gpu_that_ran_no_kernel_did_not_compute(ran: bool | None, is_found: bool) -> None:
    judged = reasons(with_facts(device_kernels=ran), spec("cuda"))
    assert (VerdictReason.WRONG_DEVICE in judged) == is_found


def test_a_cheat_spoils_ratios_as_well() -> None:
    """Variants that take turns share what disturbs them, and none of these."""
    shared = {"throttled", "foreign_process", "drift", "interrupted"}
    assert set(VerdictReason) - OF_THE_OUTPUT == shared


# ---- What the check of a request finds in its tokens and inputs, on a model that is one table of successors.


VOCABULARY, PROMPT, NEW_TOKENS = 50, 8, 40
TABLE = np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
CHANGED = "The request changed its own inputs, so that what was timed is not what was asked for."


class Table:
    """Decodes by its table; a request takes `request_s`."""

    seed = 0
    facts = SimpleNamespace(vocabulary=VOCABULARY)

    def __init__(self, request_s: float = 0.1) -> None:
        self._gaps_s = [request_s / NEW_TOKENS] * NEW_TOKENS

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        tokens = [prompt[:, -1]]
        for _ in range(new_tokens):
            tokens.append(TABLE[tokens[-1]].argmax(axis=-1))
        return Generation(np.stack(tokens[1:], axis=1), self._gaps_s)

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        for place in range(prefill, tokens.shape[1]):
            yield TABLE[tokens[:, place]]

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        return 0.1

    def forward(self, inputs: Ids) -> Pass:
        logits = TABLE[inputs[:, -1]]
        return Pass(logits, logits.argmax(axis=-1), 0.1)


class Between(Table):
    """Decodes the first and the last tokens alone, and makes up those between."""

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        honest = super().generate(prompt, new_tokens)
        tokens = honest.tokens.copy()
        tokens[:, 4:-4] = 7
        return Generation(tokens, honest.gaps_s)


def decoding(runtime: Any) -> DecodingRequest:
    return DecodingRequest(runtime, (2, PROMPT), NEW_TOKENS)


def passing(runtime: Any) -> PassRequest:
    draw = lambda source: source.integers(VOCABULARY, size=(2, PROMPT))  # noqa: E731
    return PassRequest(runtime, draw, (2, VOCABULARY), lambda seconds: {"latency_s": seconds})


def scoring(runtime: Any) -> ScoringRequest:
    return ScoringRequest(runtime, 0, (2, 20))


@pytest.mark.parametrize("request_s", [0.1, 100.0])
def test_tokens_that_the_logits_choose_pass_and_made_up_ones_do_not(request_s: float) -> None:
    assert decoding(Table(request_s)).check().problem is None
    problem = decoding(Between(request_s)).check().problem
    assert "are not what the engine predicts after the same tokens" in (problem or "")


def test_of_a_long_request_places_are_checked_that_nobody_knows_before() -> None:
    assert checked_places(PROMPT, 100, CHECKED_S, seed=0) == (PROMPT, 100)
    begins = {checked_places(PROMPT, 100, 10 * CHECKED_S, seed) for seed in range(50)}
    assert len(begins) > 20
    assert all(PROMPT <= begin < end <= 100 for begin, end in begins)


@pytest.mark.parametrize("make", [decoding, passing, scoring], ids=lambda make: make.__name__)
def test_timed_inputs_that_were_changed_are_found_by_the_check_of_fresh_ones(make: Any) -> None:
    request = make(Table())
    fresh = request.fresh(3)
    assert fresh.check().problem is None
    inputs = next(
        getattr(request, name) for name in ("_prompt", "_inputs", "_tokens") if hasattr(request, name)
    )
    inputs[0, 0] += 1
    assert fresh.check().problem == CHANGED
