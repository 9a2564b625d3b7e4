"""BenchmarkEngine: this machine's matrix products and a model's decoding, beside what is claimed for an RTX 5090."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from optigpu.claims.matching import Measured, beside, from_results
from optigpu.claims.model import UNITS, Claim, baselines, plain
from optigpu.documents.result import Result
from optigpu.facade.benchmark_result import BenchmarkResult, Picture, Shown, drawn, frame
from optigpu.facade.in_process import Decoded, decode, device_of
from optigpu.facade.measuring import JobReport, job_spec, measured
from optigpu.hardware import best_device
from optigpu.job.bench import SIZES, brief
from optigpu.paths import saying
from optigpu.report.charts import CHARTS, Report, write_chart
from optigpu.report.charts.variants import CARD
from optigpu.report.charts.variants import claims as claims_of_the_card
from optigpu.report.claims import NOT_MEASURED, figure
from optigpu.report.formats import Grid, columns, markdown, short, with_interval
from optigpu.report.rows import origin_line
from optigpu.vocabulary import BenchMode, Document, SpecError

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


PROMPT = "The future of AI is"
TITLE = "BenchmarkEngine"


class BenchmarkEngine(Shown):
    """Measures matrix products in processes of their own and loaded models in this one, and compares both with claims.

    >>> from optigpu import BenchmarkEngine, QuantizationOptimizer
    >>> engine = BenchmarkEngine(device="cpu")
    >>> model, tokenizer = QuantizationOptimizer.load("bundled:tiny", precision="bf16", device="cpu")
    >>> result = engine.run_inference(model, tokenizer, prompt="Once upon a time", label="BF16", seconds=0.1)
    >>> result.name, result.throughput_of, result.power_watts is None
    ('BF16', 'tokens', True)
    >>> sorted(path.name for path in engine.save("results/"))
    ['comparison.md', 'inference.json', 'inference.png', 'inference.svg', 'results.json']
    """

    def __init__(self, device: str | None = None) -> None:
        """`device` is where matrix products run, by default CUDA where there is a GPU; a model stays where it is."""
        self.device = best_device() if device is None else device_of(device)
        self.matmul: list[JobReport] = []
        self._decoded: list[Decoded] = []

    def run_matmul_suite(
        self,
        *,
        full: bool = False,
        sizes: Sequence[int] | None = None,
        dtypes: Sequence[str] | None = None,
        progress: bool | None = None,
        **fields: object,
    ) -> JobReport:
        """Measures square matrix products, by default with the sizes and dtypes of `optigpu bench`, more with `full`.
        The claim for an RTX 5090 is of 4096: on a CPU ask for `sizes=[4096]` to stand beside it. `fields` are those of
        a job, as `optigpu.run` takes them. Raises what that raises."""
        mode = BenchMode.FULL if full else BenchMode.QUICK
        usual = SIZES[self.device, mode]
        workload = {"kind": "matmul", "sizes": sizes or usual.sides, "dtypes": dtypes or usual.dtypes}
        asked = {"device": self.device, **brief(mode), **fields}
        report = measured(job_spec(workload, None, (), asked), progress)
        self.matmul.append(report)
        return report

    def run_inference(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None",
        prompt: str = PROMPT,
        label: str | None = None,
        *,
        new_tokens: int = 50,
        seconds: float = 3.0,
        energy: bool = False,
    ) -> BenchmarkResult:
        """Decodes `new_tokens` tokens greedily after the prompt, again and again for `seconds`, in this process. It
        runs the model's own `generate` without its decoding settings (an end token, a penalty), under torch.no_grad.
        Without a tokenizer the prompt is as many random ids as it has words. Energy takes a quarter of a minute more.
        Raises SpecError for an empty prompt or too many tokens, and OptiGPUError for output that is NaN or infinite."""
        index = len(self._decoded)
        decoded = decode(
            model,
            tokenizer,
            prompt,
            label or f"inference {index + 1}",
            index,
            new_tokens=new_tokens,
            seconds=seconds,
            energy=energy,
        )
        self._decoded.append(decoded)
        return decoded.benchmark

    @property
    def inference(self) -> list[BenchmarkResult]:
        return [each.benchmark for each in self._decoded]

    @property
    def results(self) -> list[Result]:
        """All results: those of the jobs, and one for each inference."""
        return [result for report in self.matmul for result in report.results] + [
            each.result for each in self._decoded
        ]

    def report(self) -> None:
        """Prints all tables. Raises SpecError where nothing has been measured."""
        self._require_results()
        print(self)

    def grids(self) -> Sequence[Grid]:
        products = [grid for report in self.matmul for grid in report.grids()]
        inference = [_inference_grid(self._decoded)] if self._decoded else []
        return (*products, *inference, _beside_grid(self._documents()))

    def to_frame(self) -> "DataFrame":
        """A row for each inference. Raises UnsupportedError where pandas is not installed."""
        return frame([each.record() for each in self.inference])

    def plot(self, kind: str = "baselines", path: str | Path | None = None) -> Picture:
        """A chart of all results, by default beside what is claimed for an RTX 5090, as JobReport.plot draws it."""
        return drawn(kind, Report(TITLE, self._documents()), path)

    def document(self) -> dict[str, object]:
        """Everything as plain JSON: results, the figures of each inference, and the claims beside them."""
        return {
            "results": self._documents(),
            "inference": [each.record() | {"reasons": dict(each.reasons)} for each in self.inference],
            "baselines": [_beside_document(*each) for each in _beside_card(self._documents())],
        }

    def save(self, folder: str | Path = "results/") -> tuple[Path, ...]:
        """Writes results.json, comparison.md, and charts (SVG, PNG, their data as JSON) of what there is to draw.
        Raises SpecError where nothing has been measured, OptiGPUError where the folder cannot be written."""
        self._require_results()
        place = Path(folder)
        with saying(f"{place} cannot be written", "make it writable, or name another folder"):
            place.mkdir(parents=True, exist_ok=True)
            written = [place / "results.json", place / "comparison.md"]
            written[0].write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")
            written[1].write_text("\n".join(map(markdown, self.grids())), encoding="utf-8")
            documents, jobs = self._documents(), sum(len(report.results) for report in self.matmul)
            for name, kind, results in (
                ("matmul", "ladder", documents[:jobs]),
                ("inference", "ladder", documents[jobs:]),
                ("baselines", "baselines", documents),
            ):
                with suppress(SpecError):  # nothing of that kind to draw
                    written += write_chart(CHARTS[kind](Report(TITLE, results)), place / name)
        return tuple(written)

    def _documents(self) -> list[Document]:
        return [result.model_dump(mode="json") for result in self.results]

    def _require_results(self) -> None:
        if not self.results:
            raise SpecError("Nothing has been measured; call run_matmul_suite() or run_inference() first.")


def _inference_grid(decoded: Sequence[Decoded]) -> Grid:
    headings = ("tokens/s:", "first token (ms):", "p95 of a request (ms):", "weights (MB):", "peak (MB):")
    rows = []
    for each in decoded:
        found, rate = each.benchmark, with_interval(each.result.metrics["tokens_per_s"].model_dump())
        figures = (found.first_token_ms, found.latency_ms_p95, found.model_size_mb, found.vram_peak_mb)
        rows.append((found.name, rate, *map(short, figures)))
    return Grid(
        title=f"Inference on {decoded[0].result.environment.hardware_class}",
        columns=columns("model", *headings),
        rows=tuple(rows),
        notes=(
            "Decoded one after the other in one process, whose 95% intervals do not speak of others: `optigpu.ladder` "
            "takes several, in turns. MB are 2^20 bytes.",
        ),
    )


def _beside_card(results: Sequence[Document]) -> list[tuple[Claim, list[Measured]]]:
    """The claims for the card's speed, each with the measured figures of the same work, on any hardware."""
    measured = from_results(results)
    return [(claim, beside(claim, measured)) for claim in claims_of_the_card(baselines())]


def _beside_document(claim: Claim, measured: Sequence[Measured]) -> dict[str, object]:
    figures = [
        {
            "label": each.label,
            "hardware": each.hardware,
            "value": each.value / UNITS[claim.unit],
            "of_claim": claim.over(each.value),
            "result_id": each.result_id,
        }
        for each in measured
    ]
    return {"claim": claim.model_dump(mode="json"), "measured": figures}


def _beside_grid(results: Sequence[Document]) -> Grid:
    rows = []
    for claim, found in _beside_card(results):
        about = f"{claim.what}, {claim.precision}", figure(claim)
        for each in found:
            value = f"{plain(each.value / UNITS[claim.unit])} {claim.unit}"
            rows.append((*about, each.label, value, f"{plain(claim.over(each.value))}x"))
        if not found:
            rows.append((*about, NOT_MEASURED, "", ""))
    return Grid(
        title=f"Beside what is claimed for an {CARD}",
        columns=columns("claim", "claimed:", "measured", "figure:", "of the claim:"),
        rows=tuple(rows),
        notes=(
            "Claims are published figures that OptiGPU has not measured.",
            *filter(None, [origin_line(results)]),
        ),
    )
