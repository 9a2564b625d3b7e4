"""The plan `ablation`: its variants, what is left out with a technique, what the whole loses, when compiling is paid
back, and the table of it."""

from typing import Any

import pytest

from optigpu.documents.result import Attribution, Outcome, VerdictReason
from optigpu.job.attribution import attribute
from optigpu.job.plan import variants_of, without
from optigpu.job.spec import JobSpec
from optigpu.report.formats import markdown
from optigpu.report.ladder import ladder_csv, ladder_grid
from tests.known import known
from tests.unit.test_attribution import attributed, job, measured


def ablation(*stack: str, **changes: Any) -> JobSpec:
    return job(*stack, plan="ablation", **changes)


def labels(spec: JobSpec) -> list[str]:
    return [variant.label for variant in variants_of(spec)]


def test_it_is_a_ladder_and_the_whole_without_each_technique() -> None:
    spec = ablation("bf16", "int8_weight_only", "static_kv_cache")
    variants = variants_of(spec)
    assert labels(spec)[:6] == labels(job("bf16", "int8_weight_only", "static_kv_cache"))
    assert [(variant.label, str(variant.role), variant.rung) for variant in variants[6:]] == [
        ("without bf16", "left_out", "bf16"),
        ("without int8_weight_only", "left_out", "int8_weight_only"),
    ], "without the last one it is a prefix of the ladder, which is measured once"
    assert [technique.name for technique in variants[6].stack] == ["int8_weight_only", "static_kv_cache"]


def test_what_requires_a_technique_is_left_out_with_it() -> None:
    spec = ablation("bf16", "static_kv_cache", "torch_compile")
    required = spec.stack[1]
    left, rest = without(spec, required)
    assert [each.name for each in left] == ["static_kv_cache", "torch_compile"]
    assert [each.name for each in rest] == ["bf16"]
    assert "without bf16" not in labels(spec), "that is torch_compile alone, which is measured once"


SPEEDS: dict[str, float | None] = {
    "baseline": 10,
    "bf16": 20,
    "int8_weight_only": 15,
    "static_kv_cache": 11,
    "bf16 + int8_weight_only": 24,
    "bf16 + int8_weight_only + static_kv_cache": 30,
    "without bf16": 20,
    "without int8_weight_only": 25,
}
STACK = ("bf16", "int8_weight_only", "static_kv_cache")


def left_out(spec: JobSpec, speeds: dict[str, float | None]) -> dict[str, float]:
    """The gain of each technique's row, by its name."""
    found, _ = attributed(spec, speeds)
    return {str(row.technique): round(row.left_out.ratio, 6) for row in found.rows if row.left_out}


def test_left_out_is_the_whole_over_the_whole_without_the_technique() -> None:
    assert left_out(ablation(*STACK), SPEEDS) == {
        "bf16": 1.5,
        "int8_weight_only": 1.2,
        "static_kv_cache": 1.25,
    }
    _, rows = attributed(ablation(*STACK), SPEEDS)
    assert known(rows["bf16"].left_out).compared_with == rows["without bf16"].index
    assert rows["without bf16"].technique == "bf16"
    assert rows["without bf16"].left_out is None


def test_it_does_not_depend_on_the_order_and_added_does() -> None:
    turned = tuple(reversed(STACK))
    speeds = {name: speed for name, speed in SPEEDS.items() if name in labels(ablation(*turned))}
    speeds["int8_weight_only + static_kv_cache"] = SPEEDS["without bf16"]
    speeds["without static_kv_cache"] = SPEEDS["bf16 + int8_weight_only"]
    assert left_out(ablation(*turned), speeds) == left_out(ablation(*STACK), SPEEDS)
    added = [
        {str(row.technique): row.added.ratio for row in attributed(*each)[0].rows if row.added}
        for each in ((ablation(*STACK), SPEEDS), (ablation(*turned), speeds))
    ]
    assert added[0]["bf16"] == pytest.approx(2)
    assert added[1]["bf16"] == pytest.approx(1.5), "the same technique, added last"


def outcomes(
    spec: JobSpec, wrong: str = "", reason: VerdictReason = VerdictReason.OUTPUT_INVALID
) -> dict[int, Outcome]:
    """Of variants that all took turns; the one with the label `wrong` is not valid."""
    variants = variants_of(spec)
    together = tuple(variant.index for variant in variants)
    return {
        each.index: measured(
            each, SPEEDS[each.label] or 0, *([reason] if each.label == wrong else []), beside=together
        )
        for each in variants
    }


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        (VerdictReason.LOSS_DIVERGED, (VerdictReason.LOSS_DIVERGED,)),
        (VerdictReason.FOREIGN_PROCESS, ()),
    ],
)
def test_a_wrong_output_without_the_technique_makes_the_ratio_invalid_and_a_load_does_not(
    reason: VerdictReason, kept: tuple[VerdictReason, ...]
) -> None:
    spec = ablation(*STACK)
    rows = attribute(spec, variants_of(spec), outcomes(spec, "without bf16", reason)).rows
    gain = next(row.left_out for row in rows if row.technique == "bf16" and row.left_out)
    assert gain.reasons == kept


def test_the_table_has_the_column_and_says_what_it_means() -> None:
    attribution, _ = attributed(ablation(*STACK), SPEEDS)
    grid = ladder_grid("An ablation", attribution, [])
    cells = {row[0].removesuffix(" *"): row for row in grid.rows}
    place = [column.heading for column in grid.columns].index("left out")
    assert cells["bf16"][place].startswith("1.50x [")
    assert cells["without bf16"][place] == ""
    assert any(note.startswith("left out: the speedup of the whole stack") for note in grid.notes)
    assert "left out" in markdown(grid)
    header, *lines = ladder_csv(attribution, []).splitlines()
    record = dict(zip(header.split(","), lines[1].split(","), strict=True))
    assert (record["label"], round(float(record["left_out"]), 6)) == ("bf16", 1.5)


def test_documents_without_the_new_fields_are_read_as_before() -> None:
    attribution, _ = attributed(ablation(*STACK), SPEEDS)
    document = attribution.model_dump(mode="json")
    for row in document["rows"]:
        for name in ("left_out", "left_out_with", "payback"):
            del row[name]
    read = Attribution.model_validate(document)
    assert all(row.left_out is None and row.payback is None for row in read.rows)
    assert "left out" not in [column.heading for column in ladder_grid("t", read, []).columns]


def compiled(spec: JobSpec, seconds: dict[str, tuple[float, float | None]]) -> Attribution:
    """Variants with the seconds of a request and of compiling, by label."""
    variants = variants_of(spec)
    found = {}
    for variant in variants:
        request_s, compile_s = seconds[variant.label]
        outcome = measured(variant, 1 / request_s, beside=tuple(each.index for each in variants))
        (speeds,) = outcome.samples["tokens_per_s"]
        samples = outcome.samples | {"latency_s": (tuple(1 / speed for speed in speeds),)}
        if compile_s is not None:
            samples["compile_s"] = ((compile_s,),)
        found[variant.index] = outcome.model_copy(update={"samples": samples})
    return attribute(spec, variants, found)


def test_compiling_is_paid_back_after_as_many_steps_as_it_saves_time() -> None:
    attribution = compiled(
        job("bf16", "torch_compile"),
        {
            "baseline": (1.0, None),
            "bf16": (0.5, None),
            "static_kv_cache + torch_compile": (0.6, 12.0),
            "bf16 + static_kv_cache + torch_compile": (0.25, 20.0),
        },
    )
    rows = {row.label: row for row in attribution.rows}
    alone, both = (row.payback for row in attribution.rows if row.payback)
    assert alone.steps == pytest.approx(30, rel=0.01), "12 s, and 0.4 s less for each step"
    assert alone.compared_with == rows["baseline"].index
    assert both.steps == pytest.approx(80, rel=0.01), "against the rung before, which compiled nothing"
    assert both.compared_with == rows["bf16"].index
    assert known(both.ci)[0] < 80 < known(both.ci)[1]
    assert rows["bf16"].payback is None


def test_compiling_that_makes_nothing_faster_is_never_paid_back() -> None:
    attribution = compiled(
        job("torch_compile"),
        {"baseline": (1.0, None), "static_kv_cache + torch_compile": (1.2, 12.0)},
    )
    payback = known(attribution.rows[1].payback)
    assert (payback.steps, payback.ci) == (None, None)
    grid = ladder_grid("A ladder", attribution, [])
    assert "never" in grid.rows[1]
    assert any("never paid back" in note for note in grid.notes)
