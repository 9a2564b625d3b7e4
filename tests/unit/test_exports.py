"""The public list of names; the façade's leaderboard, recommendations and predictions."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import optigpu
from optigpu import recommend_optimization, simulate_matmul
from optigpu.documents.result import Attribution
from optigpu.exports import EXPORTS
from optigpu.facade.recommendations import Recommendation, Recommendations
from optigpu.runs import KeptRun
from optigpu.vocabulary import DeviceKind, SpecError
from tests.pages import LIBRARY
from tests.unit.made_results import a_board, a_row
from tests.unit.scripted_service import Answer, Call, scripted_service


@pytest.mark.parametrize("name", EXPORTS)
def test_each_name_is_what_its_module_defines(name: str) -> None:
    found = getattr(optigpu, name)
    assert found is getattr(import_module(EXPORTS[name]), name)
    assert found.__module__ == EXPORTS[name]


def test_the_package_lists_and_exports_them() -> None:
    assert set(EXPORTS) <= set(dir(optigpu))
    assert set(optigpu.__all__) == {*EXPORTS, "__version__"}


@pytest.mark.parametrize("name", EXPORTS)
def test_each_name_is_documented(name: str) -> None:
    assert f"`{name}`" in LIBRARY.read_text("utf-8")


def one_board(call: Call) -> Answer:
    board = a_board(*(a_row(label=label) for label in ("bf16", "int8_weight_only"))).model_dump(mode="json")
    return Answer(body={"boards": [board]})


def test_a_board_is_a_table_and_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_service(one_board) as (url, calls):
        monkeypatch.setenv("OPTIGPU_URL", url)
        found: Any = optigpu.leaderboard(metric="tokens_per_s", model="preset:gpt2", api_key="secret")
    assert calls[0].path == "/v1/leaderboard?metric=tokens_per_s&model=preset%3Agpt2"
    assert calls[0].headers["authorization"] == "Bearer secret"
    assert "int8_weight_only" in str(found)
    assert "int8_weight_only" in found._repr_html_()
    assert list(found.to_frame()["label"]) == ["bf16", "int8_weight_only"]
    assert repr(found) == "Leaderboard(1 board)"


def titles(found: Recommendations) -> list[str]:
    return [each.title for each in found.recommendations]


def run(
    technique: str,
    ratio: float,
    width: float = 0.05,
    *,
    kind: str = "generate",
    device: DeviceKind = DeviceKind.CPU,
    run_id: str = "0197",
    reasons: tuple[str, ...] = (),
) -> KeptRun:
    """A kept ladder in which one technique was measured alone."""
    gain = {"ratio": ratio, "ci": (ratio - width, ratio + width), "compared_with": 0, "reasons": reasons}
    rows = [
        {"index": 0, "role": "baseline", "label": "baseline", "status": "succeeded"},
        {
            "index": 1, "role": "alone", "label": technique, "status": "succeeded",
            "technique": technique, "alone": gain,
        },
    ]  # fmt: skip
    results: list[dict[str, Any]] = [
        {
            "variant": {"index": index, "model": "preset:gpt2", "device": device, "workload": {"kind": kind}},
            "environment": {"hardware_class": "AMD EPYC 9554 2 cores"},
        }
        for index in (0, 1)
    ]
    attribution = Attribution.model_validate({"metric": "tokens_per_s", "rows": rows})
    document = {
        "id": run_id,
        "created_at": "",
        "results": results,
        "attribution": attribution.model_dump(mode="json"),
    }
    return KeptRun(Path("unused"), document)


def by_technique(found: Recommendations, name: str) -> Recommendation:
    return next(each for each in found.recommendations if each.technique == name)


def test_what_was_measured_on_this_machine_overrules_the_guide() -> None:
    slower = run("torch_compile", 0.8)
    found = recommend_optimization(0, "inference", True, "cpu", runs=[slower])
    last = found.recommendations[-1]
    assert (last.technique, last.advised, last.source) == ("torch_compile", False, "run 0197")
    assert "0.80x [0.75, 0.85] tokens_per_s of preset:gpt2" in last.effect
    assert found.priorities[-1].endswith("(not advised)")
    undecided = recommend_optimization(0, "inference", True, "cpu", runs=[run("torch_compile", 1.0)])
    assert by_technique(undecided, "torch_compile").advised


def test_the_newest_run_on_such_hardware_and_for_such_a_task_counts() -> None:
    runs = [
        run("bf16", 1.4, device=DeviceKind.CUDA, run_id="gpu"),
        run("bf16", 1.3, run_id="broken", reasons=("output_invalid",)),
        run("bf16", 1.5, run_id="newest"),
        run("bf16", 0.5, run_id="older"),
    ]
    found = recommend_optimization(0, "inference", True, "cpu", runs=runs)
    assert by_technique(found, "bf16").source == "run newest"
    on_gpu = recommend_optimization(80, "inference", True, "server_gpu", runs=runs)
    assert by_technique(on_gpu, "bf16").source == "run gpu"
    assert (
        recommend_optimization(80, "training", True, "server_gpu", runs=runs).recommendations[0].measured
        is None
    )


def test_what_was_faster_is_added_where_it_may_round() -> None:
    runs = [run("native_decode", 15.0), run("inference_mode", 1.2), run("int8_kv_cache", 0.9)]
    free = recommend_optimization(0, "inference", False, "cpu", runs=runs)
    assert titles(free)[-2:] == ["native_decode", "inference_mode"]
    exact = recommend_optimization(0, "inference", True, "cpu", runs=runs)
    assert titles(exact)[-1] == "inference_mode"
    assert "native_decode" not in titles(exact)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((8, "serving", True, "cpu"), "task: 'serving' is unknown; write one of training, inference, edge"),
        ((8, "edge", True, "phone"), "write one of server_gpu, consumer_gpu, cpu, edge"),
        ((-1, "edge", True, "cpu"), "vram_available_gb: -1 is no amount of memory"),
    ],
)
def test_unknown_words_list_the_known_ones(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        recommend_optimization(*arguments)


def test_a_matrix_product_is_predicted_and_says_so() -> None:
    flops, seconds = simulate_matmul(4096, 800)
    assert flops == 2 * 4096**3
    assert seconds == pytest.approx(flops / 800e9)
    assert str(simulate_matmul(1000, 800)).startswith("prediction: ")
