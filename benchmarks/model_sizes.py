"""`python -m benchmarks.model_sizes`: int8_hybrid over the sizes of GPT-2, and on a trained model.

Of each model: what was decided for each layer, and the bytes, which are counted and do not depend on the load. The loss
of quality is that of the trained model alone, since random weights predict nothing. With --turns the speeds too, as
ratios of processes that take turns. --show prints the tables of a file as Markdown.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.document import write
from benchmarks.layers import hybrid_table
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_model
from optigpu.models.presets import PRESETS
from optigpu.models.reference import parse_reference
from optigpu.report import console
from optigpu.report.numbers import short
from optigpu.techniques.base import Notes
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.vocabulary import Document

SIZES = ("gpt2", "gpt2-medium", "gpt2-large")
TRAINED = "bundled:tiny"
RANDOM = "random weights: their predictions mean nothing"
TOO_SMALL = "a model as small as bundled:tiny is here for its quality; its weights do not decide its speed"
NO_TURNS = "the machine was not free; ratios need processes that take turns"
BITS = (8, 4)


@dataclass(frozen=True)
class Study:
    """One model in `bits`. `layers` are the technique's own table of decisions, `ratios` speeds over fp32's by turn.

    What is null has its reason in `speed_reason` or `quality_reason`.
    """

    model: str
    parameters: int
    bits: int
    fp32_bytes: int
    weight_bytes: int
    layers: tuple[Document, ...]
    ratio: float | None = None
    ratios: tuple[float, ...] = ()
    speed_reason: str | None = NO_TURNS
    kld_mean: float | None = None
    top1_agreement: float | None = None
    quality_reason: str | None = RANDOM


def decided(model: str, bits: int) -> Study:
    """Loads the model in float32 and applies the technique to it."""
    reference = parse_reference(model)
    loaded = load_model(reference, device="cpu", dtype="float32")
    parameters = sum(each.numel() for each in loaded.parameters())
    before, notes = weight_bytes(loaded), Notes()
    Int8Hybrid(bits=bits).modules(loaded, notes)
    layers = tuple(notes.facts["hybrid_layers"])
    return Study(model, parameters, bits, before, weight_bytes(loaded), layers)


def with_quality(study: Study) -> Study:
    """The divergence from the model's own fp32 predictions."""
    spec = JobSpec.model_validate(
        {
            "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 8},
            "model": study.model,
            "stack": [{"name": "int8_hybrid", "bits": study.bits}],
            "device": "cpu",
            "limits": {"wait_for_quiet_s": 0},  # predictions do not depend on the load
            "measure": {
                "replicates": 1,
                "min_seconds": 0.1,
                "max_seconds": 1,
                "meters": ["latency", "quality"],
            },
        }
    )
    (result,) = run(spec, on_event=lambda _: None).results
    return replace(
        study,
        kld_mean=result.metrics["kld_mean"].value,
        top1_agreement=result.metrics["top1_agreement"].value,
        quality_reason=None,
    )


def with_speed(studies: Sequence[Study], turns: int) -> list[Study]:
    """Each size's processes take turns with those of the fp32 baseline."""
    found = []
    for size in SIZES:
        figures = {each.name: each for each in hybrid_table(size, turns)}
        for study in studies:
            if study.model == f"preset:{size}":
                line = figures[f"int8_hybrid bits={study.bits}"]
                reason = line.reason
                found.append(replace(study, ratio=line.ratio, ratios=line.ratios, speed_reason=reason))
    trained = (replace(study, speed_reason=TOO_SMALL) for study in studies if study.model == TRAINED)
    return [*found, *trained]


def markdown(document: Document) -> str:
    """The table of sizes, and the decisions for each layer of the smallest preset."""
    studies = document["studies"]
    return "\n".join([*_sizes(studies), "", *_decisions(studies)]) + "\n"


def _sizes(studies: Sequence[Document]) -> Iterator[str]:
    yield "| model | weights | bits | fp32 (MB) | after (MB) | share | speed | KLD (nat) | same top token |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for each in studies:
        share = each["weight_bytes"] / each["fp32_bytes"]
        cells = (
            f"`{each['model']}`",
            f"{each['parameters'] / 1e6:.1f} M",
            str(each["bits"]),
            short(each["fp32_bytes"] / 1e6),
            short(each["weight_bytes"] / 1e6),
            f"{share:.1%}",
            _speed(each),
            "null" if each["kld_mean"] is None else f"{each['kld_mean']:.5f}",
            "null" if each["top1_agreement"] is None else f"{each['top1_agreement']:.1%}",
        )
        yield f"| {' | '.join(cells)} |"
    for what, field in (("speed", "speed_reason"), ("quality", "quality_reason")):
        reasons = sorted({each[field] for each in studies if each[field]})
        if reasons:
            yield ""
            yield f"No {what} (null): {'; '.join(reasons)}."


def _speed(study: Document) -> str:
    if study["ratio"] is None:
        return "null"
    return f"{study['ratio']:.2f}x ({min(study['ratios']):.2f} to {max(study['ratios']):.2f})"


def _decisions(studies: Sequence[Document]) -> Iterator[str]:
    yield "| asked for | layer | layers | kind | bits | MB | why |"
    yield "| ---: | --- | ---: | --- | ---: | ---: | --- |"
    for study in studies:
        if study["model"] == f"preset:{SIZES[0]}":
            for layer in study["layers"]:
                yield (
                    f"| {study['bits']} | `{layer['layer']}` | {layer['layers']} | {layer['kind']} | {layer['bits']} | "
                    f"{layer['bytes'] / 1e6:.2f} | {layer['reason']} |"
                )


def main() -> int:
    """Measures the study, or prints the tables of one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_sizes", description=__doc__)
    parser.add_argument("--turns", type=int, default=0, help="requests of each process; 0 measures no speed")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--show", type=Path, help="print the tables of this file instead")
    options = parser.parse_args()
    if options.show:
        print(markdown(json.loads(options.show.read_text())), end="")
        return 0
    models = [*(f"preset:{size}" for size in SIZES if size in PRESETS), TRAINED]
    pairs = [(model, bits) for model in models for bits in BITS]
    studies = [decided(*pair) for pair in track(pairs, "deciding", console=console(stderr=True))]
    studies = [with_quality(study) if study.model == TRAINED else study for study in studies]
    studies = with_speed(studies, options.turns) if options.turns else studies
    document: dict[str, Any] = {"studies": [asdict(study) for study in studies]}
    if options.output:
        write(options.output, "model_sizes", document)
    print(markdown(document), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
