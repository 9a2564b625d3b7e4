"""The nine rows of the founding table of expected impact, and the jobs that measure each on a CPU."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from optigpu.cli.options import validated
from optigpu.conductor.recipe import make_smaller
from optigpu.job.spec import JobSpec
from optigpu.models.held import MODELS_DIR
from optigpu.recipes.request import RecipeRequest, comparison_of
from optigpu.vocabulary import DeviceKind, RecipeName

MODEL, TRAINED, AWQ_MODEL = "preset:gpt2", "bundled:tiny", "preset:opt-125m"
"""Speed and bytes are of a model of usual size with random weights, quality is of a trained one."""
CACHED_TOKENS = (32, 128)
ATTENTION_LENGTHS = (512, 1024, 2048)
STEP_LENGTHS = (256, 1024)
DECODE = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64}
LIMIT_S = 1800
Stack = tuple[dict[str, object], ...]


@dataclass(frozen=True)
class Asked:
    """How long the jobs measure, and where models are made."""

    replicates: int
    folder: Path


@dataclass(frozen=True)
class Question:
    """One job: what it compares, and its spec; `reason` instead of a spec says why there is none."""

    what: str
    spec: JobSpec | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Row:
    """A technique of the table, the beginning of its claims' ids, and its jobs."""

    name: str
    claims: str
    questions: Callable[[Asked], tuple[Question, ...]]


def pair(
    what: str,
    asked: Asked,
    workload: Mapping[str, object],
    stack: Stack,
    reference: Stack = (),
    model: str = MODEL,
    meters: tuple[str, ...] = ("latency", "memory"),
) -> Question:
    """A stack beside its reference; the processes of both take turns."""
    return Question(
        what,
        validated(
            {
                "name": f"expected impact: {what}"[:100],
                "workload": dict(workload),
                "model": model,
                "stack": list(reference),
                "beside": [{"stack": list(stack), "label": what[:100]}],
                "device": "cpu",
                "measure": {
                    "replicates": asked.replicates,
                    "min_seconds": 3,
                    "max_seconds": 20,
                    "meters": list(meters),
                },
                "limits": {"timeout_s": LIMIT_S},
            }
        ),
    )


def _quality(asked: Asked, *stack: dict[str, object]) -> Question:
    """Of a trained model, which random weights cannot stand for."""
    meters = ("latency", "memory", "quality")
    return pair("quality of a trained model", asked, DECODE, stack, model=TRAINED, meters=meters)


def _decoded(asked: Asked, *stack: dict[str, object]) -> tuple[Question, ...]:
    return pair("decoding", asked, DECODE, stack), _quality(asked, *stack)


def _attention(asked: Asked) -> tuple[Question, ...]:
    """The operator's forward pass, and whole steps of training, whose backward pass reads the scores again."""
    operator = {"kind": "attention", "lengths": list(ATTENTION_LENGTHS)}
    measure = {"replicates": asked.replicates, "min_seconds": 2, "max_seconds": 10, "meters": ["latency"]}
    spec = validated(
        {"workload": operator, "device": "cpu", "measure": measure, "limits": {"timeout_s": LIMIT_S}}
    )
    steps = (
        pair(
            f"a training step of {length} tokens, forward and backward",
            asked,
            {"kind": "train_step", "batch_size": 1, "sequence_tokens": length, "optimizer": "sgd"},
            ({"name": "fused_attention"},),
            ({"name": "eager_attention"},),
        )
        for length in STEP_LENGTHS
    )
    return Question("the operator, forward", spec), *steps


def _cache(asked: Asked) -> tuple[Question, ...]:
    return tuple(
        pair(
            f"{tokens} tokens after a prompt of 32",
            asked,
            DECODE | {"new_tokens": tokens},
            ({"name": "kv_cache"},),
            ({"name": "no_kv_cache"},),
            meters=("latency",),
        )
        for tokens in CACHED_TOKENS
    )


def _checkpointing(asked: Asked) -> tuple[Question, ...]:
    workload = {"kind": "train_step", "batch_size": 4, "sequence_tokens": 256, "optimizer": "sgd"}
    return tuple(
        pair(f"steps, {mode}", asked, workload, ({"name": "gradient_checkpointing", "mode": mode},))
        for mode in ("full", "selective")
    )


def _packed(asked: Asked) -> tuple[Question, ...]:
    """Ready checkpoints that are written here; their numbers are rounded to nearest, so that only speed and bytes are
    those of the methods."""
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference
    from tests.engine.packed_models import Layout, write_packed

    found = []
    for method, name in (("gptq", MODEL), ("awq", AWQ_MODEL)):
        model = load_model(parse_reference(name), device="cpu", dtype="float32")
        write_packed(asked.folder / method, model, Layout(method=method, exact=False))
        technique: Stack = ({"name": method},)
        found.append(
            pair(
                f"decoding a {method.upper()} checkpoint of {name}",
                asked,
                DECODE,
                technique,
                model=f"path:{method}",
            )
        )
    reason = "choosing 4-bit numbers by GPTQ or AWQ needs GPTQModel, which needs a newer torch than is pinned"
    return *found, Question("quality of a trained model", reason=reason)


def _recipe(recipe: RecipeName) -> Callable[[Asked], tuple[Question, ...]]:
    def questions(asked: Asked) -> tuple[Question, ...]:
        request = RecipeRequest(recipe=recipe, model=TRAINED, output=asked.folder / recipe)
        outcome = make_smaller(request, lambda _: None, lambda: None, LIMIT_S)
        spec = comparison_of(outcome, DeviceKind.CPU, asked.replicates)
        return (Question(f"{TRAINED}: {outcome.changed}, made in {outcome.seconds:.0f} s", spec),)

    return questions


def prepare(asked: Asked) -> None:
    """Where the models that are made here are looked for."""
    os.environ[MODELS_DIR] = str(asked.folder)


ROWS = (
    Row("mixed precision, BF16", "impact-bf16", lambda asked: _decoded(asked, {"name": "bf16"})),
    Row("Flash Attention 2", "impact-flash", _attention),
    Row(
        "torch.compile",
        "impact-compile",
        lambda asked: (
            pair(
                "decoding",
                asked,
                DECODE,
                ({"name": "static_kv_cache"}, {"name": "torch_compile"}),
            ),
        ),
    ),
    Row("KV cache", "impact-kv-cache", _cache),
    Row("gradient checkpointing", "impact-checkpointing", _checkpointing),
    Row("INT8 quantization", "impact-int8", lambda asked: _decoded(asked, {"name": "int8_weight_only"})),
    Row("INT4, GPTQ or AWQ", "impact-int4", _packed),
    Row("distillation", "impact-distillation", _recipe(RecipeName.DISTILLATION)),
    Row("structured pruning", "impact-pruning", _recipe(RecipeName.STRUCTURED_PRUNING)),
)
"""In the order of the founding table."""
