"""What a result says of its machine, its origin and how it ran, as names and values for people."""

from collections.abc import Iterator, Mapping

from optigpu.documents.older import facts_of
from optigpu.report.numbers import short
from optigpu.vocabulary import Document

Facts = tuple[tuple[str, str], ...]
LONGEST = 300
SHOWN_APART = ("accelerators", "software", "variables", "cpu_features")


def environment_facts(document: Document) -> Facts:
    """The machine: hardware first, then software."""
    environment = document["environment"]
    return (
        ("Hardware class", environment["hardware_class"]),
        *_plain(environment, left_out=("hardware_class", *SHOWN_APART)),
        *((f"GPU {number}", _line(gpu)) for number, gpu in enumerate(environment.get("accelerators", ()))),
        *(("CPU features", " ".join(each)) for each in [environment.get("cpu_features")] if each),
        *((name, str(version)) for name, version in sorted(environment.get("software", {}).items())),
        *((name, str(value)) for name, value in environment.get("variables", {}).items()),
    )


def provenance_facts(document: Document) -> Facts:
    """Where it comes from. What is not known is left out with its reason."""
    provenance = document.get("provenance") or {}
    reasons = (
        (f"No {name.replace('_', ' ')}", reason) for name, reason in provenance.get("reasons", {}).items()
    )
    ids = [
        ("Result", document["id"]),
        ("Job", document.get("job_id") or "none"),
        ("Source", document["source"]),
    ]
    variant = document["variant"]
    ids += [("Workload digest", variant["workload_digest"]), ("Variant digest", variant["variant_digest"])]
    return (*ids, *_plain(provenance, left_out=("reasons",)), *reasons)


def measuring_facts(document: Document) -> Facts:
    """How the variant ran: single facts; those that are made of others are shown elsewhere."""
    return tuple(
        _plain(facts_of(document), left_out=("reasons", "roofline", "quality", "recorded", "described"))
    )


def roofline_facts(document: Document) -> Facts:
    """How far the variant's step is from what the machine allows; the reason where that is not known."""
    roofline = facts_of(document).get("roofline") or {}
    step = roofline.get("step")
    if not step:
        return (("No roofline", roofline["reason"]),) if roofline.get("reason") else ()
    reached = step["attainable_s"] / step["measured_s"] if step.get("measured_s") else None
    roof = step["roof"]
    return (
        ("Share of the roof", "-" if reached is None else f"{100 * reached:.0f}%"),
        ("Limited by", str(step.get("bound") or "unknown")),
        ("Intensity", f"{short(step['flops_per_byte'])} FLOP per byte"),
        ("A step takes", f"{short(1e3 * step['measured_s'])} ms" if step.get("measured_s") else "-"),
        ("The roof allows", f"{short(1e3 * step['attainable_s'])} ms"),
        ("Measured bandwidth", f"{short(roof['bytes_per_s'] * 1e-9)} GB/s"),
        ("Measured rate", f"{short(roof['flops_per_s'] * 1e-9)} GFLOP/s"),
    )


def quality_facts(document: Document) -> Facts:
    """On what quality was measured."""
    quality = facts_of(document).get("quality") or {}
    return tuple(_plain(quality, left_out=("without_part", "losses", "fp32_losses", "intervals")))


def _plain(document: Document, left_out: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if name not in left_out and (words := _value(name, value)):
            yield name.replace("_", " ").capitalize(), words


def _value(name: str, value: object) -> str:
    """Empty for what is not known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and name.endswith("bytes"):
        return f"{short(value * 1e-9)} GB"
    if isinstance(value, float):
        return short(value)
    if isinstance(value, Mapping):
        return _line(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_line(each) if isinstance(each, Mapping) else str(each) for each in value)[:LONGEST]
    return str(value)[:LONGEST]


def _line(document: Document) -> str:
    """An object on one line, without what is not known."""
    known = ((name, value) for name, value in document.items() if value not in (None, {}, [], ()))
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known)[:LONGEST]
