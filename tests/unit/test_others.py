"""Files of other tools, as these wrote them about SmolLM2-135M on two cores; what is long in them was cut out."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.others import OthersFile
from optigpu.others.formats import FORMATS, read
from optigpu.others.reading import MISSING, at
from optigpu.report.others import others_grid
from optigpu.vocabulary import SpecError

FILES: dict[str, Any] = json.loads((Path(__file__).parent / "files_of_others.json").read_text())
Reader = Callable[[object], OthersFile | None]
FIGURES = [
    ("GuideLLM", "ttft_s", "median", "benchmarks.0.metrics.time_to_first_token_ms.successful.median", 1e-3),
    ("GuideLLM", "tpot_s", "mean", "benchmarks.0.metrics.inter_token_latency_ms.successful.mean", 1e-3),
    ("AIPerf", "ttft_s", "p95", "time_to_first_token.p95", 1e-3),
    ("AIPerf", "tokens_per_s", "whole", "output_token_throughput.avg", 1.0),
    ("vllm bench serve", "tpot_s", "median", "median_tpot_ms", 1e-3),
    ("vllm bench serve", "requests_per_s", "whole", "request_throughput", 1.0),
    ("llama-benchy", "ttft_s", "mean", "benchmarks.0.e2e_ttft.mean", 1e-3),
    ("llama-bench", "prefill_tokens_per_s", "mean", "0.avg_ts", 1.0),
    ("llama-bench", "tokens_per_s", "mean", "1.avg_ts", 1.0),
    ("optimum-benchmark", "ttft_s", "mean", "report.prefill.latency.mean", 1.0),
    ("optimum-benchmark", "tokens_per_s", "whole", "report.decode.throughput.value", 1.0),
    ("optimum-benchmark", "host_peak_bytes", "whole", "report.prefill.memory.max_ram", 1e6),
    ("lm-evaluation-harness", "accuracy", "whole", "results.hellaswag_40.acc_norm,none", 1.0),
]
VERSIONS = {
    "GuideLLM": "0.8.1",
    "AIPerf": "0.13.0",
    "vllm bench serve": None,
    "llama-benchy": "0.4.0",
    "llama-bench": None,
    "optimum-benchmark": "0.6.0",
    "lm-evaluation-harness": "0.4.13",
}
SERVED = ("GuideLLM", "AIPerf", "vllm bench serve")
"""Tools whose files have all three times of a request."""


@pytest.fixture
def reads(tmp_path: Path) -> Reader:
    """Reads a document as the file that it came from."""

    def of(document: object) -> OthersFile | None:
        path = tmp_path / "file.json"
        path.write_text(json.dumps(document))
        return read(path)

    return of


def values(file: OthersFile | None, metric: str, statistic: str) -> list[float]:
    assert file is not None
    figures = (figure for row in file.rows for figure in row.figures)
    return [each.value for each in figures if (each.metric, each.statistic) == (metric, statistic)]


def changed(tool: str, path: str, value: object) -> object:
    """The tool's file with another value at a path."""
    document = copy.deepcopy(FILES[tool])
    *way, last = path.split(".")
    parent = at(document, ".".join(way)) if way else document
    assert isinstance(parent, dict)
    assert last in parent
    parent[last] = value
    return document


def test_there_is_a_real_file_of_each_format() -> None:
    assert [each.tool for each in FORMATS] == list(FILES)


@pytest.mark.parametrize("tool", FILES)
def test_a_file_is_recognized_and_all_of_it_is_taken_or_left_out(tool: str, reads: Reader) -> None:
    assert [each.tool for each in FORMATS if each.begins(FILES[tool])] == [tool]
    file = reads(FILES[tool])
    assert file is not None
    assert file.tool == tool
    assert file.version == VERSIONS.get(tool, file.version)
    assert MISSING not in {each.why for each in file.left_out}
    notes = " ".join(others_grid(file, left_out=True).notes)
    assert all(each.named in notes for each in file.left_out)


@pytest.mark.parametrize(("tool", "metric", "statistic", "path", "factor"), FIGURES)
def test_a_figure_is_that_of_the_file_in_our_unit(
    tool: str, metric: str, statistic: str, path: str, factor: float, reads: Reader
) -> None:
    found = at(FILES[tool], path)
    assert isinstance(found, int | float)
    assert pytest.approx(found * factor) in values(reads(FILES[tool]), metric, statistic)


@pytest.mark.parametrize("tool", SERVED)
def test_the_times_of_a_request_make_up_its_latency(tool: str, reads: Reader) -> None:
    """Units and definitions that did not fit each other would show: 32 tokens are the first and 31 more."""
    file = reads(FILES[tool])
    (ttft,), (tpot,), (latency,) = (values(file, name, "mean") for name in ("ttft_s", "tpot_s", "latency_s"))
    assert latency == pytest.approx(ttft + 31 * tpot, rel=0.01)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("p99_ttft_ms", None, MISSING),
        ("p99_ttft_ms", "fast", "not a finite number"),
        ("p99_ttft_ms", float("nan"), "not a finite number"),
        ("p99_ttft_ms", float("inf"), "not a finite number"),
        ("p99_ttft_ms", True, "not a finite number"),
    ],
)
def test_what_is_no_figure_is_left_out_and_said(path: str, value: object, why: str, reads: Reader) -> None:
    file = reads(changed("vllm bench serve", path, value))
    assert file is not None
    assert {each.named: each.why for each in file.left_out}[path] == why
    assert values(file, "ttft_s", "p99") == []
    assert len(values(file, "ttft_s", "mean")) == 1


def test_a_unit_is_read_and_an_unknown_one_is_not_guessed(reads: Reader) -> None:
    (milliseconds,) = values(reads(FILES["AIPerf"]), "ttft_s", "mean")
    seconds = values(reads(changed("AIPerf", "time_to_first_token.unit", "s")), "ttft_s", "mean")
    assert seconds == [pytest.approx(1000 * milliseconds)]
    file = reads(changed("AIPerf", "time_to_first_token.unit", "ticks"))
    assert file is not None
    assert values(file, "ttft_s", "mean") == []
    assert "in an unknown unit, ticks" in {each.why for each in file.left_out}


def test_a_file_of_no_known_tool_is_none_and_one_without_figures_is_refused(reads: Reader) -> None:
    strangers: tuple[object, ...] = ([], {}, 3, {"results": []}, {"benchmarks": "many"}, None)
    for document in strangers:
        assert reads(document) is None
    with pytest.raises(SpecError, match="one of GuideLLM, and holds no figure"):
        reads(changed("GuideLLM", "benchmarks", []))
    assert reads(changed("GuideLLM", "benchmarks", None)) is None
