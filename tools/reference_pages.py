"""The pages of techniques and of metrics, made from the code for the documentation's site (tools/docs_site.py)."""

from collections.abc import Iterable, Sequence

from optigpu.hardware.device_kinds import KINDS
from optigpu.report.catalog import parameters_text, technique_fact
from optigpu.report.formats import Grid, columns, markdown
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import METRICS, Document
from optigpu.workloads import WORKLOADS


def techniques_page() -> str:
    headings = ("name", "layer", "backend", "devices", "what it does", "needs", "excludes", "compared with")
    rows = (
        (
            f"`{fact['name']}`",
            fact["layer"],
            ", ".join(fact["backends"]),
            ", ".join(fact["devices"]),
            fact["summary"],
            ", ".join(fact["requires"]),
            ", ".join(fact["conflicts"]),
            ", ".join(fact["compared_with"]) or "baseline",
            parameters_text(fact) if fact["parameters"] else "",
            "; ".join(map(_expected, fact["expected"]))
            + (" (a cautionary rung)" if fact["cautionary"] else ""),
            fact["citation"],
        )
        for fact in map(technique_fact, TECHNIQUES.values())
    )
    table = _table((*headings, "parameters", "expected", "source"), rows)
    return f"# Techniques\n\n{_TECHNIQUES_WORDS}\n{table}\n{_devices()}"


def metrics_page() -> str:
    metrics = ((f"`{name}`", m.unit, f"{m.better} is better", m.meaning) for name, m in METRICS.items())
    workloads = (
        (
            f"`{name}`",
            kind.summary,
            f"`{kind.primary}`",
            ", ".join(
                f"`{metric}`" for metric in (*kind.metrics, *kind.for_some, *kind.of_queries, *kind.of_loads)
            ),
        )
        for name, kind in WORKLOADS.items()
    )
    return (
        "# Workloads and metrics\n\n"
        + _table(("workload", "what it does", "compared by", "metrics of each request"), workloads)
        + "\n"
        + _table(("metric", "unit", "direction", "meaning"), metrics)
        + "\n## A metric's summary\n\n"
        + _table(("field", "meaning"), _SUMMARY_FIELDS)
    )


def _devices() -> str:
    """The abilities that each kind of device lacks, and the techniques that therefore do not run there."""
    kinds = (
        (
            f"`{device}`",
            facts.title,
            f"`{facts.torch}`",
            ", ".join(facts.sources) or "OptiGPU is written for it",
        )
        for device, facts in KINDS.items()
    )
    rows = (
        (
            f"`{device}`",
            ability,
            reason,
            ", ".join(f"`{name}`" for name, kind in TECHNIQUES.items() if ability in kind.abilities)
            or "no technique",
        )
        for device, facts in KINDS.items()
        for ability, reason in facts.lacks.items()
    )
    headings = ("device", "lacks", "because", "techniques that need it")
    known = _table(("device", "is", "torch calls it", "what is said of it is from"), kinds)
    return f"## Where a technique does not run\n\n{_DEVICES_WORDS}\n{known}\n{_table(headings, rows)}"


_SUMMARY_FIELDS = (
    ("`value`", "the median over the requests of a process, averaged over the processes (geometric mean)"),
    (
        "`ci`, `freedom`",
        "the 95% interval of `value`: over processes; of one process with 24 requests or more its own; of quality over "
        "windows, images or items. `freedom` is that of the Student's t that it comes from",
    ),
    (
        "`n`, `n_effective`",
        "the number of samples, and how many independent ones those of a process are worth",
    ),
    ("`per_replicate`", "the median of each process"),
    (
        "`beside`",
        "how many times the figure of each variant that was side by side this one is, by that variant's index: for "
        "each pair of processes the Hodges-Lehmann estimate over turns that followed each other; empty for metrics "
        "without a sample of each request",
    ),
    (
        "`cv_within`",
        "the coefficient of variation of the requests within a process, averaged over the processes",
    ),
    ("`cv_between`", "the coefficient of variation of the processes' medians"),
    (
        "`p50`, `p90`, `p95`, `p99`",
        "percentiles of each process's requests, averaged over the processes as `value` is; they need 11, 64, 130 and "
        "662 requests",
    ),
    (
        "`p90_upper`, `p95_upper`, `p99_upper`",
        "the upper 95% bound of the percentile, over processes, others than the measured ones included. It needs two "
        "processes with 64, 130 and 662 requests each, more where requests are autocorrelated",
    ),
    ("`reason`", "why the value, its interval, a percentile or a bound is null"),
)

_TECHNIQUES_WORDS = """\
"Compared with" is the reference for the gain of a technique alone. Each part of "expected" names its basis first:

- **literature**: a publication reports it: the source of the row, or the named one.
- **arithmetic**: it follows from counting bytes or operations.
- **measured here**: OptiGPU measured it; the linked page says how and on which machine.
- **aim**: we expect it, and `optigpu ladder` measures it on your machine.
"""


_DEVICES_WORDS = """\
[Other devices](gpu-box.md#other-devices) describes `rocm`, `xpu` and `mps`, on which nothing has run. Some
parameters need more than their technique does: `mixed_precision` in float16 needs a scaled loss, a mode of
`torch_compile` that records graphs needs recorded graphs, `activation_offload` to the host needs memory apart from it,
a named kernel of `fused_attention` a choice of kernels, and `qlora` with the base int4 OptiGPU's own kernels.
"""


def _expected(part: Document) -> str:
    """`**measured here**: 4.57x (results/README.md)`, with a link to the page."""
    source, page = part["source"], part["basis"] == "measured here"
    return f"**{part['basis']}**: {part['text']}" + (
        "" if source is None else f" ([{source}]({source}))" if page else f" ({source})"
    )


def _table(headings: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    return markdown(Grid("", columns(*headings), tuple(rows)))
