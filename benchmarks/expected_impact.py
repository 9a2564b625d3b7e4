"""`python -m benchmarks.expected_impact`: the nine rows of the founding table of expected impact, measured on this CPU.

Every row is one job or more, in which a technique and what it is compared with take turns. What cannot be measured is
null, with the reason. --show prints the rows of a file as Markdown, beside their claims.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.document import write
from optigpu.claims.model import baselines
from optigpu.cli.options import validated
from optigpu.conductor.tasks import make_smaller
from optigpu.documents.result import Gain, Result
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.models.held import MODELS_DIR
from optigpu.recipes.request import RecipeRequest, comparison_of
from optigpu.report.formats import console
from optigpu.vocabulary import DeviceKind, Document, OptiGPUError, RecipeName

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


BYTES = ("weight_bytes", "peak_bytes")
QUALITY = ("kld_mean", "top1_agreement", "perplexity")


@dataclass(frozen=True)
class Figure:
    """What one comparison came to: the ratio of speeds with its interval, shares of the reference's bytes, quality.

    `reasons` say why the ratio does not hold, or why there is none.
    """

    what: str
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    weight_bytes: float | None = None
    peak_bytes: float | None = None
    kld_mean: float | None = None
    top1_agreement: float | None = None
    perplexity: float | None = None
    reasons: tuple[str, ...] = ()


def figures_of(row: Row, asked: Asked) -> list[Figure]:
    """All comparisons of a row; a job that fails is a figure with the reason."""
    try:
        questions = row.questions(asked)
    except OptiGPUError as error:
        return [Figure(row.name, reasons=(str(error),))]
    found: list[Figure] = []
    for question in questions:
        found += _answers(question)
    return found


def _answers(question: Question) -> list[Figure]:
    if question.spec is None:
        return [Figure(question.what, reasons=(question.reason or "",))]
    try:
        report = run(question.spec, on_event=lambda _: None)
    except OptiGPUError as error:
        return [Figure(question.what, reasons=(str(error),))]
    return list(answers_of(question.what, report))


def answers_of(what: str, report: Report) -> Iterator[Figure]:
    """The variants of a job that were compared with another."""
    results = {outcome.index: outcome.result for outcome in report.outcomes if outcome.result}
    for row in report.attribution.rows:
        label = what if row.label in what else f"{what}: {row.label}"
        if row.reason is not None:
            yield Figure(label, reasons=(row.reason,))
        elif row.speedup is not None:
            yield _figure(label, row.speedup, results[row.index], results[row.speedup.compared_with])


def _figure(what: str, gain: Gain, result: Result, reference: Result) -> Figure:
    def share(metric: str) -> float | None:
        mine, whole = value(result, metric), value(reference, metric)
        return mine / whole if mine is not None and whole else None

    return Figure(
        what,
        gain.ratio,
        gain.ci,
        share("weight_bytes"),
        share("peak_bytes"),
        value(result, "kld_mean"),
        value(result, "top1_agreement"),
        value(result, "perplexity"),
        tuple(str(reason) for reason in gain.reasons),
    )


def value(result: Result, metric: str) -> float | None:
    """A figure of a result; None where it was not measured."""
    found = result.metrics.get(metric)
    return None if found is None else found.value


def markdown(document: Document) -> str:
    """The rows as lines of a table: technique, claims, what was measured."""
    lines = ["| technique | claims | measured here |", "| --- | --- | --- |"]
    for row in document["rows"]:
        cells = "; ".join(_said(figure) for figure in row["figures"])
        lines.append(f"| {row['name']} | {_claimed(row['claims'])} | {cells} |")
    return "\n".join(lines) + "\n"


def _claimed(ids: str) -> str:
    claims = [claim for claim in baselines().claims if claim.id == ids or claim.id.startswith(f"{ids}-")]
    said = (
        f"{claim.metric} {claim.value:g}{f' to {claim.to:g}' if claim.to else ''} {claim.unit}"
        for claim in claims
    )
    return ", ".join(said)


def _said(figure: Document) -> str:
    if figure["ratio"] is None:
        return f"{figure['what']}: null: {' '.join(figure['reasons'])}"
    interval = "" if figure["ci"] is None else " [{:.2f}, {:.2f}]".format(*figure["ci"])
    parts = [f"{figure['what']}: {figure['ratio']:.2f}x{interval}"]
    parts += [f"{figure[name]:.1%} of the {name.replace('_', ' ')}" for name in BYTES if figure[name]]
    parts += [f"{name} {figure[name]:.4g}" for name in QUALITY if figure[name] is not None]
    parts += [f"not valid: {reason}" for reason in figure["reasons"]]
    return ", ".join(parts)


def measured(rows: Sequence[Row], replicates: int) -> Iterator[Document]:
    """The rows as JSON, each when it is measured."""
    with tempfile.TemporaryDirectory(prefix="optigpu-impact-") as folder:
        asked = Asked(replicates, Path(folder))
        os.environ[MODELS_DIR] = folder  # where the models that are made here are looked for
        for row in track(rows, "measuring", console=console(stderr=True)):
            figures = [asdict(figure) for figure in figures_of(row, asked)]
            yield {"name": row.name, "claims": row.claims, "figures": figures}


def main() -> int:
    """Measures, or prints what was; the exit status is 0 if every row has a figure that holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expected_impact", description=__doc__)
    names = [row.claims.removeprefix("impact-") for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--replicates", type=int, default=3, help="processes of each variant")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print the rows of this file instead")
    options = parser.parse_args()
    if options.show:
        print(markdown(json.loads(options.show.read_text())), end="")
        return 0
    load = os.getloadavg()[0]
    wanted = [row for row in ROWS if row.claims.removeprefix("impact-") in options.rows]
    rows: list[Document] = []
    for row in measured(wanted, options.replicates):
        rows.append(row)
        if options.output:  # after each, so that an interruption loses one row
            write(options.output, "expected_impact", {"load_before": load, "rows": rows})
    print(markdown({"rows": rows}), end="")
    held = [any(each["ratio"] and not each["reasons"] for each in row["figures"]) for row in rows]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
