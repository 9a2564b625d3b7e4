"""`python -m benchmarks.bits`: what each format of weights costs in quality for its bytes, from 2 bits to 16.

One job for each trained model: our packed weights, llama.cpp's types and, of a Llama, those of its fork ik_llama.cpp.
One more for each: our packed weights with calibration="sequential", beside Q4_0.
Each is loaded once, for the bytes of its weights and its divergence from fp32 on WikiText-2; its speed is measured for
a moment alone and says little. The chart joins what no other format surpasses. --show prints files of results.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.document import write
from benchmarks.engine_cases import SPEED, EngineCase
from benchmarks.engines import FOLDER, draw, measured
from benchmarks.stacks import Stack, llama_cpp, named
from optigpu.report.numbers import scaled, with_interval
from optigpu.vocabulary import Document

OURS = (
    Stack("w3k, groups of 64", named("native_decode", weights="w3k", group=64)),
    Stack("w3k", named("native_decode", weights="w3k")),
    *(
        Stack(f"w3k, {share:.0%} more", named("native_decode", weights="w3k", extra_bytes=share))
        for share in (0.1, 0.15, 0.2)
    ),
    Stack("w4, groups of 64", named("native_decode", group=64)),
    Stack("w4", named("native_decode")),
    Stack("w4k, groups of 64", named("native_decode", weights="w4k", group=64)),
    Stack("w4k", named("native_decode", weights="w4k")),
    *(Stack(f"w4, {share:.0%} more", named("native_decode", extra_bytes=share)) for share in (0.2, 0.4)),
    Stack("w8", named("native_decode", weights="w8")),
    Stack("bf16", named("native_decode", weights="bf16")),
)


def _sequential(label: str, **options: str | float) -> Stack:
    technique = {"name": "native_decode", "calibration": "sequential", **options}
    return Stack(f"{label}, sequential", (technique,))


SEQUENTIAL = (
    Stack("w4", named("native_decode")),
    _sequential("w3k", weights="w3k"),
    *(_sequential(f"w3k, {share:.0%} more", weights="w3k", extra_bytes=share) for share in (0.1, 0.15, 0.2)),
    _sequential("w4"),
    _sequential("w4k, groups of 64", weights="w4k", group=64),
    _sequential("w4k", weights="w4k"),
    llama_cpp("Q4_0"),
)
LLAMA_CPP = tuple(
    llama_cpp(kind)
    for kind in (
        *("Q2_K", "IQ3_XXS", "Q3_K_S", "IQ3_S", "Q3_K_M", "IQ4_XS"),
        *("Q4_0", "Q4_K_M", "Q5_0", "Q5_K_M", "Q6_K", "Q8_0"),
    )
)
IK = tuple(
    Stack(f"ik {kind}", named("gguf", type=kind, pure=True), "ik_llama_cpp")
    for kind in ("IQ2_K", "IQ3_K", "IQ4_KSS", "IQ4_KS", "IQ4_K", "IQ5_K", "IQ6_K")
)
"""Of one type for all matrices: without that it takes llama.cpp's mixtures."""


def _case(model: str, *stacks: Stack) -> EngineCase:
    return EngineCase(
        model,
        (Stack("float32"), *stacks),
        budget_s=1800,
        name="quality by bits",
        prompt_tokens=8,
        new_tokens=8,
        replicates=1,
        seconds=0.2,
        meters=(*SPEED, "quality"),
        quality_tokens=4000,
    )


FIGURES = ("weight_bytes", "kld_mean", "kld_p99", "top1_agreement", "perplexity")
"""What is kept of each result."""
CASES = {
    "tiny": _case("bundled:tiny", *OURS, *LLAMA_CPP),
    "small": _case("bundled:small", *OURS, *LLAMA_CPP, *IK),
    "sequential_tiny": _case("bundled:tiny", *SEQUENTIAL),
    "sequential_small": _case("bundled:small", *SEQUENTIAL),
}
"""A GPT-2, which ik_llama.cpp does not run, and a Llama; and what sequential calibration gives beside Q4_0."""


def markdown(document: Document, chart: str) -> str:
    """The formats by their bytes, the reason where there is no figure."""
    rows = sorted(map(_row, document["results"]), key=lambda row: row[1])
    lines = [
        f"## `{document['spec']['model']}`",
        "",
        f"![Bytes over divergence]({chart})",
        "",
        "| weights | MB | divergence (nat) | same token (%) |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {name} | {size / 1e6:.2f} | {divergence} | {top} |" for name, size, divergence, top in rows),
        "",
        *(
            f"- {row['label']}: {row['reason']}"
            for row in document["attribution"]["rows"]
            if row["reason"] is not None
        ),
    ]
    return "\n".join(lines)


def _row(result: Document) -> tuple[str, float, str, str]:
    metrics = result["metrics"]
    return (
        str(result["variant"]["label"]),
        float(metrics["weight_bytes"]["value"]),
        with_interval(metrics["kld_mean"]),
        scaled(metrics["top1_agreement"], 100.0),
    )


def main() -> int:
    """Measures or shows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder for bits_CASE.json and .svg")
    parser.add_argument("--show", type=Path, nargs="+", help="print these files of results instead")
    options = parser.parse_args()
    for path in options.show or ():
        print(markdown(json.loads(path.read_text()), path.with_suffix(".svg").name))
    for name in () if options.show else options.cases:
        path = options.output / f"bits_{name}.json"
        document = shortened(measured(CASES[name]))
        write(path, "bits", document)
        draw(document, path.with_suffix(".svg"), "bits")
        print(markdown(document, path.with_suffix(".svg").name))
    return 0


def shortened(document: dict[str, Any]) -> dict[str, Any]:
    """Without what the table and the chart leave out: it would be five times as long."""
    results = [
        {name: value for name, value in result.items() if name not in ("facts", "rounds")}
        | {"metrics": {name: result["metrics"][name] for name in FIGURES}}
        for result in document["results"]
    ]
    return document | {"results": results}


if __name__ == "__main__":
    sys.exit(main())
