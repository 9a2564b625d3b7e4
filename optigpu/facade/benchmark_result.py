"""BenchmarkResult: what one benchmark found, with None and the reason for what was not measured. And how the facade's
objects show themselves: tables on a terminal and in a notebook, data frames, pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group

from optigpu.documents.fields import closest, did_you_mean, require_known
from optigpu.report.charts import CHARTS, Report
from optigpu.report.charts.svg import picture, write_picture
from optigpu.report.formats import Grid, console, html, short, terminal
from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    from pandas import DataFrame


class Shown:
    """The base of what is shown as tables: rich prints it, and a notebook displays it."""

    def grids(self) -> Sequence[Grid]:
        raise NotImplementedError

    def __rich__(self) -> Group:
        return Group(*map(terminal, self.grids()))

    def __str__(self) -> str:
        page = console()
        with page.capture() as captured:
            page.print(self)
        return captured.get().rstrip("\n")

    def _repr_html_(self) -> str:
        return "".join(map(html, self.grids()))


def frame(records: Sequence[Mapping[str, object]]) -> "DataFrame":
    """The records as a pandas DataFrame, one row each. Raises UnsupportedError where pandas is not installed."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise UnsupportedError("A data frame needs pandas; install it with `pip install pandas`.") from None
    return DataFrame.from_records(list(records))


@dataclass(frozen=True)
class Picture:
    """A chart that was drawn, as SVG; `path` is the file that was asked for, None for a picture in memory alone."""

    svg: str
    path: Path | None = None

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture({self.path or f'{len(self.svg):,} characters of SVG'})"


def drawn(kind: str, report: Report, path: str | Path | None = None) -> Picture:
    """A chart of a report, also written to `path`, whose suffix (.svg, .png) chooses the format. Raises SpecError for
    an unknown kind, and where the results have nothing that such a chart shows."""
    require_known(kind, CHARTS, f"There is no chart {kind!r}", "The charts are")
    data, file = CHARTS[kind](report), None if path is None else Path(path)
    if file is not None:
        write_picture(data, file)
    return Picture(picture(data), file)


MEBIBYTE = 2**20
"""Bytes of what the fields call MB."""
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class BenchmarkResult:
    """The figures of one benchmark of a model.

    Memory is in MB of 2**20 bytes. `latency_ms_mean` is the mean over all runs, `latency_ms_ci` the 95% interval of
    their median, and `throughput_per_sec` counts what `throughput_of` names. `flops_total` are the floating-point
    operations of one run, `energy_j` its energy above that of the idle device, `latencies_s` the seconds of each run,
    `first_token_ms` the median time to the first token of generated text. A figure that was not measured is None, and
    `reasons` may say why, by the field's name; `notes` say what else a reader should know.

    >>> result = BenchmarkResult("my model", latency_ms_mean=12.5, throughput_per_sec=80.0, params_total=1_000)
    >>> result.print_summary()
    === my model ===
      Latency:    12.5 ms mean; p50, p95, p99 not measured
      Throughput: 80.0 items/s
      Memory:     VRAM not measured, host not measured
      Parameters: 1,000 (trainable not measured), size not measured
      FLOPs:      not measured
      Power:      not measured
      Accuracy:   not measured
    """

    name: str
    vram_allocated_mb: float | None = None
    vram_reserved_mb: float | None = None
    vram_peak_mb: float | None = None
    latency_ms_mean: float | None = None
    latency_ms_p50: float | None = None
    latency_ms_p95: float | None = None
    latency_ms_p99: float | None = None
    throughput_per_sec: float | None = None
    params_total: int | None = None
    params_trainable: int | None = None
    model_size_mb: float | None = None
    accuracy: float | None = None
    flops_total: float | None = None
    power_watts: float | None = None
    energy_j: float | None = None
    host_peak_mb: float | None = None
    latency_ms_ci: tuple[float, float] | None = None
    throughput_of: str = "items"
    first_token_ms: float | None = None
    notes: tuple[str, ...] = ()
    latencies_s: tuple[float, ...] = field(default=(), repr=False)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """The figures by their names, without samples and reasons."""
        left_out = {"latencies_s", "reasons", "notes"}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}

    def print_summary(self) -> None:
        """Prints every figure, and below them why others were not measured."""
        print(f"=== {self.name} ===")
        for line in self._lines():
            print(f"  {line}")
        for why in dict.fromkeys([*self.notes, *self.reasons.values()]):
            print(f"  ({why})")

    def _lines(self) -> Iterator[str]:
        ci = self.latency_ms_ci
        within = f", median in [{short(ci[0])}, {short(ci[1])}]" if ci else ""
        found = {"p50": self.latency_ms_p50, "p95": self.latency_ms_p95, "p99": self.latency_ms_p99}
        percentiles = [f"{name} {short(value)} ms" for name, value in found.items() if value is not None]
        if unknown := [name for name, value in found.items() if value is None]:
            percentiles.append(f"{', '.join(unknown)} {NOT_MEASURED}")
        yield f"Latency:    {_figure(self.latency_ms_mean, 'ms mean')}{within}; {', '.join(percentiles)}"
        if self.first_token_ms is not None:
            yield f"First:      {_figure(self.first_token_ms, 'ms to the first token')}"
        yield f"Throughput: {_figure(self.throughput_per_sec, f'{self.throughput_of}/s')}"
        before = (
            f" ({_figure(self.vram_allocated_mb, 'MB')} before the run)"
            if self.vram_peak_mb is not None
            else ""
        )
        vram = _figure(self.vram_peak_mb, "MB peak") + before
        yield f"Memory:     VRAM {vram}, host {_figure(self.host_peak_mb, 'MB peak')}"
        parameters = NOT_MEASURED
        if self.params_total is not None:
            trainable = NOT_MEASURED if self.params_trainable is None else f"{self.params_trainable:,}"
            parameters = f"{self.params_total:,} (trainable {trainable})"
        yield f"Parameters: {parameters}, size {_figure(self.model_size_mb, 'MB')}"
        yield f"FLOPs:      {_figure(None if self.flops_total is None else self.flops_total / 1e9, 'GFLOP a run')}"
        yield f"Power:      {_figure(self.power_watts, 'W')}"
        yield f"Accuracy:   {NOT_MEASURED if self.accuracy is None else f'{self.accuracy:.4f}'}"


def _figure(value: float | None, unit: str) -> str:
    return NOT_MEASURED if value is None else f"{short(value)} {unit}"


class Indexed:
    """The base of frozen dataclasses: `row["step_ms"]` is `row.step_ms`."""

    def __getitem__(self, name: str) -> object:
        """Raises KeyError, which lists the fields, for a name that is none of them."""
        values: dict[str, object] = vars(self)
        if name not in values:
            meant = did_you_mean(closest(name, values))
            raise KeyError(f"There is no field {name!r}.{meant} The fields are {', '.join(values)}.")
        return values[name]
