"""Tables and lines that one command each shows."""

from collections.abc import Callable, Sequence

from optigpu.documents.result import Attribution, Result
from optigpu.engines.environments import RECIPES, EngineEnvironment
from optigpu.job.search import is_allowed, left_out, pareto
from optigpu.job.spec import LARGEST_BATCH
from optigpu.measure import Report
from optigpu.recipes.request import RecipeOutcome
from optigpu.report.formats import NOT_VALID, Grid, columns, scaled, short, tabulated, with_interval
from optigpu.report.rows import heading, origin_line
from optigpu.vocabulary import Document


def batch_grid(report: Report) -> Grid:
    """One row for each variant: its largest batch, how many times the baseline's that is, or why it has none."""
    limits, results = report.spec.limits, {result.variant.index: result for result in report.results}
    batches = {index: int(result.metrics[LARGEST_BATCH].value or 0) for index, result in results.items()}
    plain = batches.get(0)
    rows = []
    for row in report.attribution.rows:
        found, tried = batches.get(row.index), 0
        if found is not None:
            noted = results[row.index].facts.recorded.get("batches_tried")
            tried = len(noted) if isinstance(noted, list) else 0
        times = f"{found / plain:.2f}" if found and plain else ""
        rows.append((row.label, str(found or ""), times, str(tried or ""), row.reason or ""))
    most = f"{limits.max_batch} is the most that was tried."
    return Grid(
        title=f"Largest batch under {(limits.max_bytes or 0) / 1e9:.3g} GB",
        columns=columns("stack", "largest batch:", "times as many:", "attempts:", "why"),
        rows=tuple(rows),
        notes=(most,) if limits.max_batch in batches.values() else (),
    ).without_empty_columns()


Measured = tuple[Sequence[Document], Attribution]
"""The results of one of bench's jobs, and what its techniques bought."""


def bench_line(jobs: Sequence[Measured]) -> str:
    """The best figure of each job, then when, where and with what they were measured."""
    parts = list(filter(None, (_figure(results, attribution) for results, attribution in jobs)))
    origin = origin_line([result for results, _ in jobs for result in results])
    return f"{'; '.join(parts)}. {origin}" if parts else "Nothing could be measured."


def _figure(results: Sequence[Document], attribution: Attribution) -> str | None:
    """For example "preset:gpt2, native_decode: 602 [558, 635] tokens/s, 22.9x the baseline"."""

    def rank(result: Document) -> tuple[bool, float]:
        """Valid figures before others, then the larger: all of bench's are better when larger."""
        return bool(result["verdict"]["valid"]), primary(result)["value"] or 0.0

    def primary(result: Document) -> Document:
        metric: Document = result["metrics"][result["variant"]["primary_metric"]]
        return metric

    best = max(results, key=rank, default=None)
    if best is None or primary(best)["value"] is None:
        return None
    variant = best["variant"]
    subject = variant["model"] or variant["workload"]["kind"]
    mark = "" if best["verdict"]["valid"] else NOT_VALID
    row = next((each for each in attribution.rows if each.index == variant["index"]), None)
    gain = f", {row.speedup.ratio:.1f}x the baseline" if row and row.speedup else ""
    speed = f"{with_interval(primary(best))} {heading(attribution.metric)}{mark}"
    return f"{subject}, {variant['label']}: {speed}{gain}"


def engine_facts() -> list[Document]:
    """Each engine that has an environment of its own; `folder` is where that is or would be."""
    return [
        {
            "name": each.recipe.name,
            "summary": each.recipe.summary,
            "installed": each.is_whole,
            "minutes": each.recipe.minutes,
            "bytes": each.recipe.bytes,
            "folder": str(each.folder),
            "command": each.recipe.install_command,
        }
        for each in map(EngineEnvironment, RECIPES.values())
    ]


def engines_grid(facts: Sequence[Document]) -> Grid:
    """With the command that makes each, or the folder that it is in."""
    return tabulated(
        "Engines with an environment of their own",
        facts,
        {
            "engine": lambda fact: fact["name"],
            "what it is": lambda fact: fact["summary"],
            "takes": lambda fact: f"{fact['minutes']} minutes, {fact['bytes'] / 2**30:.1f} GiB",
            "installed": lambda fact: fact["folder"] if fact["installed"] else f"no: {fact['command']}",
        },
    )


def recipe_grid(outcome: RecipeOutcome) -> Grid:
    """A row for the teacher, for the smaller model as it began, and as it ended."""
    request = outcome.request
    teacher = (request.model, f"{outcome.teacher_parameters:,}", short(outcome.teacher_perplexity), "0")
    began = (
        "smaller, untrained",
        f"{outcome.parameters:,}",
        short(outcome.perplexity_before),
        short(outcome.kld_before),
    )
    ended = ("smaller, trained", f"{outcome.parameters:,}", short(outcome.perplexity), short(outcome.kld))
    return Grid(
        title=f"{request.recipe}: {outcome.changed}",
        columns=columns("model", "weights:", "perplexity:", "KLD (nat):"),
        rows=(teacher, began, ended),
        notes=(
            "On text that the larger model wrote and that was not trained on; its own perplexity is the least possible "
            "on average.",
            f"{request.steps} steps of {request.batch_size} texts, {outcome.seconds:.0f} s in all.",
            f"Written to {request.output}: set OPTIGPU_MODELS_DIR={request.output.parent} and name it "
            f"path:{request.output.name}.",
        ),
    )


def pareto_grid(report: Report) -> Grid:
    """The Pareto set over speed, bytes, quality and energy, the fastest first; figures of short rounds say so."""
    primary = report.spec.workload.primary
    allowed = [result for result in report.results if is_allowed(report.spec, result)]
    found = sorted(
        pareto(allowed, primary), key=lambda result: result.metrics[primary].value or 0.0, reverse=True
    )
    missed = left_out(report.spec)
    notes = ["No other stack is as good in each of speed, bytes, quality and energy, and better in one."]
    if missed:
        notes.append(f"{missed} more stacks of the menu were not tried; raise limits.max_variants.")

    def figure(name: str) -> Callable[[Result], str]:
        return lambda result: with_interval(_summary(result, name))

    return tabulated(
        f"Pareto set of {len(report.outcomes)} stacks",
        found,
        {
            "stack": lambda result: result.variant.label + ("" if result.verdict.valid else NOT_VALID),
            f"{heading(primary)}:": figure(primary),
            "weights (MB):": lambda result: scaled(_summary(result, "weight_bytes"), 1e-6),
            "kld_mean (nat):": figure("kld_mean"),
            "J/token:": figure("j_per_token"),
            "measured in round:": lambda result: (
                f"{result.facts.recorded.get('search_round', 1)} of {result.facts.recorded.get('search_rounds', 1)}"
            ),
        },
        notes,
    ).without_empty_columns()


def _summary(result: Result, name: str) -> Document | None:
    found = result.metrics.get(name)
    return found.model_dump(mode="json") if found else None
