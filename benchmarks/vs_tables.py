"""The document of `vs_peers` as Markdown."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.vs_cases import KIN, QUALITY

Line = dict[str, Any]
BUSY = 0.25
"""Share of the cores that others may use before a run; who waits for threads by spinning suffers most from them."""


def markdown(document: dict[str, Any]) -> str:
    """Every case's table, how the peers were built, and the goals."""
    quality = document["quality"]
    parts = [_speed(name, case, quality) for name, case in document["speed"].items()]
    parts += [_quality(name, case) for name, case in quality.items()]
    parts += [_built(document), _goals(document["goals"])]
    load, cores = document["load_before"], document["cores"]
    if load > BUSY * cores:
        parts.insert(
            0,
            f"**Others used this machine: a load of {load:.1f} on {cores} cores before the run. Ratios mean little.**",
        )
    return "\n\n".join(parts)


def _speed(name: str, case: dict[str, Any], quality: dict[str, Any]) -> str:
    what = case["case"]
    kin = KIN[what["preset"]]
    lines = quality.get(kin, {"lines": ()})["lines"]
    divergences = {line["name"]: line.get("kld_mean") for line in lines}
    shape = f"{what['prompt_tokens']} tokens" + (f" + {what['new_tokens']}" if what["new_tokens"] else "")
    # A document of before jobs has turns alone.
    how = f"{case['measure']['replicates']} processes" if "measure" in case else f"{case['turns']} turns"
    title = f"### {name}: `preset:{what['preset']}`, batch 1, {shape}, {how}"
    if "reason" in case:
        return f"{title}\n\nNot measured: {case['reason']}"
    reference = case["lines"][0]
    headings = (
        "what",
        "tokens/s",
        f"x {reference['name']}",
        "95% interval",
        "MB",
        f"KLD on `{QUALITY[kin]}`",
    )
    rows = [_speed_row(line, divergences.get(line["name"])) for line in case["lines"]]
    rows += [(name, "", text, "", "", "") for name, text in case["published"].items()]
    return f"{title}\n\n{_table(headings, rows)}"


def _speed_row(line: Line, divergence: float | None) -> Sequence[str]:
    if line["reason"]:
        return (line["name"], "", _reason(line), "", "", "")
    ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
    figures = (f"{line['rate']:.1f}", ratio, _spread(line), _megabytes(line))
    return (line["name"], *figures, "" if divergence is None else f"{divergence:.5f}")


def _spread(line: Line) -> str:
    """The ratio's interval with what is wrong with the result; of a peer in turns the lowest and the highest ratio."""
    if "ratios" in line:
        return f"{min(line['ratios']):.2f}..{max(line['ratios']):.2f} of {len(line['ratios'])} turns"
    bounds = line["ratio_interval"]
    marks = [f"NOT valid: {', '.join(line['verdict'])}"] if line["verdict"] else []
    return "; ".join(
        ([f"{bounds[0]:.2f}..{bounds[1]:.2f}"] if bounds else []) + marks + list(line["warnings"])
    )


def _quality(name: str, quality: dict[str, Any]) -> str:
    title = (
        f"### {name}: `{quality['model']}` against its fp32 self, {quality['sequences']} x "
        f"{quality['length']} tokens, {quality['positions']} positions"
    )
    headings = ("what", "KLD", "99th percentile", "same top token", f"KLD - {quality['beside']}'s", "MB")
    return f"{title}\n\n{_table(headings, [_quality_row(line) for line in quality['lines']])}"


def _quality_row(line: Line) -> Sequence[str]:
    if "reason" in line:
        return (line["name"], _reason(line), "", "", "", "")
    beside = line.get("beside")
    return (
        line["name"],
        f"{line['kld_mean']:.5f} ± {line['kld_standard_error']:.5f}",
        f"{line['kld_p99']:.4f}",
        f"{line['top1_agreement']:.1%}",
        f"{beside['difference']:+.5f} ± {beside['standard_error']:.5f}" if beside else "",
        _megabytes(line),
    )


def _built(document: dict[str, Any]) -> str:
    """The flags of each peer's process, and of which types the tensors of llama.cpp's files are."""
    flags: dict[str, list[str]] = {}
    files: list[str] = []
    for model, line in _lines_with_models(document):
        details = line.get("details") or {}
        if "flags" in details:
            text = f"{details['version']}, {details['threads']} threads, {details['flags']}"
            flags.setdefault(text, []).append(line["name"])
        if "tensor_types" in details:
            counts = ", ".join(f"{count} {kind}" for kind, count in details["tensor_types"].items())
            files.append(f"- {line['name']} of `{model}`: {counts}")
    rows = [f"- {'; '.join(dict.fromkeys(names))}: {text}" for text, names in flags.items()]
    return "\n".join(
        ["### How the peers were built, and their files' tensors", "", *rows, *dict.fromkeys(files)]
    )


def _lines_with_models(document: dict[str, Any]) -> Iterator[tuple[str, Line]]:
    for case in document["speed"].values():
        for line in case.get("lines", []):
            yield f"preset:{case['case']['preset']}", line
    for case in document["quality"].values():
        for line in case["lines"]:
            yield case["model"], line


def _goals(goals: Iterable[dict[str, Any]]) -> str:
    rows = [f"- {'reached' if goal['reached'] else 'NOT reached'}: {goal['goal']}" for goal in goals]
    return "\n".join(["### Goals", "", *rows])


def _reason(line: Line) -> str:
    """In one cell."""
    return " ".join(line["reason"].replace("|", "/").split())


def _megabytes(line: Line) -> str:
    return "" if line["weight_bytes"] is None else f"{line['weight_bytes'] / 1e6:.1f}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, marks, *rows))
