"""Sentences that a paper needs: how results were measured, and what to cite."""

from collections.abc import Sequence

from optigpu.report.origin import origin_line
from optigpu.report.rows import took_turns
from optigpu.vocabulary import Document


def methods(spec: Document, results: Sequence[Document]) -> str:
    """How the results of a job were measured, in a few sentences for a paper's section on methods."""
    measure = spec["measure"]
    count, replicates = len(results), measure["replicates"]
    together = any(len(result["facts"].get("side_by_side") or ()) > 1 for result in results)
    turns = " in turns with the other variants" if together else ""
    sentences = (
        f"{_counted(count, 'variant')} {'was' if count == 1 else 'were each'} measured in "
        f"{_counted(replicates, 'process')} of its own{turns}, for {measure['min_seconds']:g} to "
        f"{measure['max_seconds']:g} s of timed requests after requests had become steady.",
        "A figure is the median over the requests of a process, averaged over the processes (geometric mean).",
        f"Intervals are 95% by Student's t on the logarithms of the processes' medians; {_of_ratios(results)}."
        if replicates > 1
        else "Intervals are 95% of the one process that was measured, and do not show how processes differ.",
        "Rounds that other processes, the hypervisor, a quota or heat disturbed were set aside where enough others "
        "were clean; otherwise the interval reaches as far as the disturbance can have cost.",
        origin_line(results) or "",
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _of_ratios(results: Sequence[Document]) -> str:
    """What the intervals of ratios come from."""
    if any(map(took_turns, results)):
        return (
            "the ratio of variants that took turns is the Hodges-Lehmann estimate over turns that followed each other, "
            "for each pair of processes, and its interval is over these pairs"
        )
    return "those of ratios are paired where variants took turns"


def _counted(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def citation(results: Sequence[Document]) -> str:
    """A citation of the software that measured, in the Citation File Format."""
    environment = results[0]["environment"] if results else {}
    version = (environment.get("software") or {}).get("optigpu", "unknown")
    lines = [
        "cff-version: 1.2.0",
        "message: If you use these results, please cite the software that measured them.",
        "title: OptiGPU",
        "type: software",
        "authors:",
        "  - name: The OptiGPU maintainers",
        f'version: "{version}"',
    ]
    if environment.get("git_revision"):
        lines.append(f"commit: {environment['git_revision']}")
    return "\n".join(lines) + "\n"
