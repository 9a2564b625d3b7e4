"""The ground floor: base models, enumerations, units, identifiers and errors. Imports nothing of ours."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple, Self
from uuid import UUID

import uuid_utils
from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 2
"""Version of the stored documents (spec and result), raised when a field changes its name or its meaning.

Version 2 has a result's typed `facts` where version 1 had `details`; optigpu.documents.versions reads both.
"""


class OptiGPUError(Exception):
    """Base of every error that this package raises on purpose; its text is one sentence for a person."""


class SpecError(OptiGPUError):
    """The job can never run, on any machine."""


class UnsupportedError(OptiGPUError):
    """This machine or this model cannot do it; the text says why."""


class ReplicateError(OptiGPUError):
    """A measuring process ended without its measurements."""


class OutOfMemoryError(ReplicateError):
    """A measuring process ended because there was no memory left."""


class HostMemoryError(OutOfMemoryError):
    """The kernel killed a measuring process because the host had no memory left."""


class CrashError(ReplicateError):
    """A measuring process ended by a signal that a fault of its own raises."""


class DamagedModelError(CrashError):
    """A measuring process crashed on a converted model that was kept; the model has been removed."""


class OverdueError(ReplicateError):
    """A measuring process took more than its share of the job's time."""


class StoppedError(OptiGPUError):
    """The job stops before everything is measured; what is finished is kept."""


class CancelledError(StoppedError):
    """Somebody asked for the job to stop."""


class DeadlineError(StoppedError):
    """The job's time limit was reached."""


class AttemptEndedError(OptiGPUError):
    """This worker cannot go on with the job; what is unfinished is left to the next attempt."""


class LeaseLostError(OptiGPUError):
    """The job belongs to another worker by now."""


class StoreError(OptiGPUError):
    """The results database refused."""


class NotFoundError(StoreError):
    """There is no such row."""


class ConflictError(StoreError):
    """The request contradicts what is stored: an idempotency key with another body, a withdrawal of a running job."""


class DocumentError(StoreError):
    """The document holds something that not every database can store."""


class ServiceError(OptiGPUError):
    """The service answered with a problem document (RFC 9457)."""

    def __init__(self, message: str, status: int, problem: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem or {}


class UnreachableError(OptiGPUError):
    """No service answers at the address."""


class Frozen(BaseModel):
    """Base of all our data: immutable, strict about its fields, no NaN and no infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Layer(StrEnum):
    """The four layers of the stack, what goes beyond them (fewer weights, other ways to decode), and training."""

    QUANTIZATION = "quantization"
    KERNELS = "kernels"
    MEMORY = "memory"
    COMPILATION = "compilation"
    SPARSITY = "sparsity"
    DECODING = "decoding"
    TRAINING = "training"


class DeviceKind(StrEnum):
    """The kind of device of a variant. optigpu.hardware.device_kinds says what each has."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MPS = "mps"


class Scheduler(StrEnum):
    """What owns the machines of a cluster. Each of SCHEDULERS has a file in `optigpu.clusters` and one in
    `worker.launchers`; the other is retired: stored jobs and results name it, and no job is handed to it."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"


SCHEDULERS = (Scheduler.SLURM,)
"""The schedulers that a job may name."""


class BenchMode(StrEnum):
    """How much `optigpu bench` measures."""

    QUICK = "quick"
    FULL = "full"


class Precision(StrEnum):
    """What weights are stored as while a model decodes."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class RecipeName(StrEnum):
    """What `optigpu recipe` makes a smaller model by."""

    DISTILLATION = "distillation"
    STRUCTURED_PRUNING = "structured_pruning"


class JobState(StrEnum):
    """queued -> running -> succeeded | failed | cancelled; running -> queued when another attempt follows; failed
    -> queued when a person puts a parked job back."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended; only a person who retries a parked one changes that."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class FailureKind(StrEnum):
    """What an attempt at a job failed of, as far as it decides what follows: optigpu.store.transitions."""

    LOST = "lost"
    DATABASE_AWAY = "database_away"
    DEVICE_LOST = "device_lost"
    OUT_OF_MEMORY = "out_of_memory"
    BROKEN = "broken"
    REFUSED = "refused"
    NOT_STARTED = "not_started"
    ALLOCATION_ENDED = "allocation_ended"


class VariantStatus(StrEnum):
    """The state of a variant. `unsupported`: this machine or model cannot run it; `failed`: an error occurred."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Task(StrEnum):
    """The task of a workload's model: decode text, pass over a prompt once, classify images, be trained; or no model at
    all."""

    DECODING = "decoding"
    PREFILL = "prefill"
    IMAGES = "images"
    TRAINING = "training"
    OPERATOR = "operator"

    @property
    def needs_model(self) -> bool:
        """Whether a model is loaded for it."""
        return self is not Task.OPERATOR


class Role(StrEnum):
    """Why a variant is in its plan."""

    SINGLE = "single"
    BASELINE = "baseline"
    REFERENCE = "reference"
    ALONE = "alone"
    CUMULATIVE = "cumulative"
    LEFT_OUT = "left_out"


class Better(StrEnum):
    """Which direction of a metric is an improvement."""

    HIGHER = "higher"
    LOWER = "lower"


class Metric(NamedTuple):
    """The meaning of a metric's name."""

    unit: str
    better: Better
    meaning: str


def _more(unit: str, meaning: str) -> Metric:
    return Metric(unit, Better.HIGHER, meaning)


def _less(unit: str, meaning: str) -> Metric:
    return Metric(unit, Better.LOWER, meaning)


METRICS: dict[str, Metric] = {
    "tokens_per_s": _more("1/s", "tokens decoded per second: after the first token, under load all"),
    "requests_per_s": _more("1/s", "whole requests per second"),
    "goodput_per_s": _more("1/s", "requests per second that were answered within the limits"),
    "queue_length": _less("1", "mean number of requests without a first token, under load"),
    "highest_rate_per_s": _more(
        "1/s", "the highest rate of arrivals at which the limits are kept and the queue does not grow"
    ),
    "prefill_tokens_per_s": _more("1/s", "prompt tokens per second, up to the first new token"),
    "scored_tokens_per_s": _more("1/s", "tokens of a given text predicted per second"),
    "images_per_s": _more("1/s", "images classified, or trained on, per second"),
    "samples_per_s": _more("1/s", "training samples (documents or images) per second"),
    "trained_tokens_per_s": _more("1/s", "tokens trained on per second, without padding"),
    "padded_tokens_per_s": _more("1/s", "tokens computed per second while training, padding included"),
    "step_s": _less("s", "one training step: data, forward, backward and optimizer"),
    "data_s": _less("s", "part of a training step in which its batch is arranged and copied"),
    "forward_s": _less("s", "part of a training step in which losses are computed"),
    "backward_s": _less("s", "part of a training step in which gradients are computed"),
    "optimizer_s": _less("s", "part of a training step in which weights are updated"),
    "ttft_s": _less(
        "s",
        "time to first token: from the request's start, under load the moment at which it was to be sent, until its "
        "first token is chosen",
    ),
    "tpot_s": _less("s", "time per output token after the first"),
    "latency_s": _less("s", "one whole request or operation, end to end"),
    "tflops": _more("TFLOP/s", "floating-point operations per second"),
    "gb_per_s": _more("GB/s", "bytes that an operation has to read and write, per second"),
    "peak_bytes": _less(
        "B",
        "peak memory allocated on the accelerator; for an operator or a training step on a CPU, peak bytes of its "
        "tensors",
    ),
    "peak_reserved_bytes": _less("B", "peak memory that the allocator reserved on the accelerator"),
    "weight_bytes": _less("B", "bytes of parameters and buffers; shared ones count once"),
    "host_peak_bytes": _less("B", "peak resident memory of the measuring process"),
    "params_total": _less("1", "number of the model's weights, before the stack is applied"),
    "params_trainable": _less("1", "number of weights that training changes, with the stack applied"),
    "bytes_per_param": _less("B", "weight_bytes divided by params_total"),
    "quantized_share": _more(
        "1", "share of the model's weights that the stack's technique of weights quantized"
    ),
    "energy_j": _less("J", "energy of one request above that of the idle device"),
    "power_w": _less("W", "mean power while requests run, idle power included"),
    "j_per_token": _less("J", "energy above idle per generated token"),
    "j_per_image": _less("J", "energy above idle per image, classified or trained on"),
    "j_per_1000_tokens": _less("J", "energy above idle per 1,000 tokens trained on, without padding"),
    "gpu_utilization": _more("1", "share of time in which a kernel ran on the GPU"),
    "kld_mean": _less(
        "nat",
        "mean Kullback-Leibler divergence from fp32's distribution of the next token, or of an image's class",
    ),
    "kld_p99": _less("nat", "99th percentile of the divergence over positions or images"),
    "top1_agreement": _more(
        "1", "share of positions (images) where the most likely token (class) is the same as fp32's"
    ),
    "alone_agreement": _more(
        "1", "share of the tokens decoded under load that are exactly those of decoding each request alone"
    ),
    "perplexity": _less("1", "exponential of the mean negative log-likelihood of a text's tokens"),
    "perplexity_delta": _less("1", "perplexity minus that of the fp32 model on the same text"),
    "accuracy": _more(
        "1", "share of a multiple-choice test's items, or of labelled images, answered correctly"
    ),
    "accuracy_loss_percent": _less("%", "accuracy lost, in percent of the fp32 model's"),
    "loss_final": _less("nat", "mean loss over the last quarter of the steps that are compared with fp32's"),
    "loss_deviation": _less(
        "1",
        "distance of the losses of training from fp32's on the same samples, as a share of the band of seed noise; "
        "above 1 is outside",
    ),
    "gradient_norm": _less("1", "2-norm of the gradient of the mean loss at the first step, before clipping"),
    "mbu": _more(
        "1",
        "model bandwidth utilization: share of the measured memory bandwidth that the model's own bytes use",
    ),
    "mfu": _more(
        "1",
        "model FLOPs utilization: share of the measured matrix-product rate that the model's own operations use",
    ),
    "hfu": _more(
        "1",
        "hardware FLOPs utilization: as mfu, of all operations that were executed, recomputed ones included",
    ),
    "largest_batch": _more(
        "1", "samples of the largest batch that found enough memory under the job's limit"
    ),
    "headroom": _less("1", "how many times faster the roofline allows the variant to be"),
    "memory_bound_share": _less("1", "share of kernel time in memory-bound kernels"),
    "compute_bound_share": _more("1", "share of kernel time in compute-bound kernels"),
    "launches_per_step": _less("1", "kernels (on a CPU: operators) that run for one decode step"),
    "compile_s": _less("s", "extra time of the first requests, compared with a steady one"),
    "load_s": _less("s", "time to create or read the model and to apply the stack"),
}
"""Every metric name with its unit and direction."""

COUNTED_METRICS = frozenset(
    {"weight_bytes", "params_total", "params_trainable", "bytes_per_param", "quantized_share"}
)
"""What is counted on the model and not measured: its value is exact without an interval."""


@dataclass(frozen=True)
class Changeable:
    """Base of dataclasses that are handed on with changes."""

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)


def first_line(error: Exception) -> str:
    """What an error says first, without its stop; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def unsupported(
    kinds: type[Exception] | tuple[type[Exception], ...], sentence: Callable[[str], str]
) -> Iterator[None]:
    """Raises UnsupportedError(sentence(why)) for an error of these kinds; `why` is its first line."""
    try:
        yield
    except kinds as error:
        raise UnsupportedError(sentence(first_line(error))) from error


def as_value_error(function: Any, *arguments: Any) -> Any:
    """Converts our errors to ValueErrors, which pydantic collects into its report."""
    try:
        return function(*arguments)
    except SpecError as error:
        raise ValueError(str(error)) from error


def new_id() -> str:
    """A UUIDv7 as text: unique, and sorted by time."""
    return str(uuid_utils.uuid7())


def is_id(text: str) -> bool:
    """Whether `text` is a UUID in its canonical form."""
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False


Document = Mapping[str, Any]
"""A JSON object that was stored or sent, read by its keys; it may be of an older or newer version."""


def utc_now() -> datetime:
    """The current time in UTC, with its time zone."""
    return datetime.now(UTC)


_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """The text without characters that steer a terminal (ESC, a change of direction); tabs and line ends stay."""
    return _STEERING.sub("", text)


def canonical_json(document: object) -> str:
    """The one JSON text of a document: sorted keys, no spaces; what digests are taken of. Raises DocumentError for NaN,
    infinity, or a NUL character, which not every database can hold."""
    check_document(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def check_document(document: object) -> None:
    """Refuses what JSON or PostgreSQL cannot hold. Raises DocumentError that names the place of a NaN, an infinity, a
    NUL character or a lone surrogate."""
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
        sound = "\\u0000" not in text and bool(text.encode())
    except (TypeError, ValueError):
        sound = False
    if not sound:  # a walk takes ten times as long, and finds the place
        _check_parts(document, "$")


def _check_parts(document: object, path: str) -> None:
    if isinstance(document, float) and not math.isfinite(document):
        raise DocumentError(
            f"{path} is {document}, which is not valid JSON; store null and the reason instead."
        )
    if isinstance(document, str):
        if "\x00" in document:
            raise DocumentError(f"{path} contains a NUL character; remove it.")
        try:
            document.encode()
        except UnicodeEncodeError:
            raise DocumentError(f"{path} contains an unpaired surrogate; remove it.") from None
    elif isinstance(document, dict):
        for key, value in document.items():
            _check_parts(str(key), f"{path} (a key)")
            _check_parts(value, f"{path}.{key}")
    elif isinstance(document, (list, tuple)):
        for index, value in enumerate(document):
            _check_parts(value, f"{path}[{index}]")
