"""The leaderboard over HTTP: filters, pages, and its three forms."""

import csv
import io
from datetime import timedelta
from typing import Any

import pytest

from optigpu.client import Client
from optigpu.documents.result import Result, VerdictReason, VerdictWarning
from optigpu.documents.views import Board, LeaderboardPage
from optigpu.store import leaderboard
from optigpu.vocabulary import ServiceError
from tests.service.pages import HTML
from tests.service.records import NOON, a_metric, a_result
from tests.service.serving import Served


def boards(service: Served, **query: Any) -> list[dict[str, Any]]:
    """The boards of a first page."""
    answer = service.client.get("/v1/leaderboard", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = LeaderboardPage.model_validate_json(answer.content).model_dump()["boards"]
    return found


def rows(service: Served, **query: Any) -> list[dict[str, Any]]:
    """The rows of all boards of a first page."""
    return [row for board in boards(service, **query) for row in board["rows"]]


def tokens(value: float) -> dict[str, Any]:
    """An interval so narrow that no two overlap."""
    return {"tokens_per_s": a_metric("tokens_per_s", value, (value - 0.1, value + 0.1))}


def generated(speed: float, index: int, **changes: Any) -> Result:
    """A made-up result of a `generate` job, with all of the workload's shapes."""
    result = a_result(tokens(speed), index=index, **changes)
    workload = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 64, "batch_size": 1}
    return result.model_copy(update={"variant": result.variant.model_copy(update={"workload": workload})})


@pytest.fixture
def ranked(service: Served) -> Served:
    """A service with made-up results: three stacks, two machines, two workloads."""
    made = [
        generated(10, 0),
        generated(30, 1, stack=("bf16",)),
        generated(20, 2, stack=("bf16", "torch_compile")),
        generated(90, 3, stack=("bf16",), hardware="1x Other GPU"),
        a_result({"tflops": a_metric("tflops", 2.0)}, index=4, workload="matmul"),
        generated(99, 5, stack=("fp16",), valid=False),
    ]
    service.submit()
    service.finish(service.claim(), *made)
    return service


@pytest.mark.slow
def test_the_best_come_first_and_only_valid_results_are_ranked(ranked: Served) -> None:
    found = [[(row["rank"], row["value"]["value"]) for row in board["rows"]] for board in boards(ranked)]
    assert found == [[(1, 90), (2, 30), (3, 20), (4, 10)], [(1, 2.0)]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "values"),
    [
        ({"metric": "tflops"}, [2.0]),
        ({"technique": "bf16"}, [90, 30, 20]),
        ({"technique": "torch_compile"}, [20]),
        ({"hardware": "other"}, [90]),
        ({"model": "preset:gpt2", "workload": "generate", "backend": "torch", "limit": 2}, [90, 30]),
        ({"workload": "matmul"}, [2.0]),
        ({"workload": "matmul", "metric": "tokens_per_s"}, []),
        ({"model": "preset:opt-125m"}, []),
        ({"backend": "llama_cpp"}, []),
        ({"technique": "int8_weight_only"}, []),
        ({"technique": "BF16"}, [90, 30, 20]),
        ({"source": "worker", "clean": True}, []),
        ({"technique": "fp16", "include_invalid": True}, [99]),
    ],
)
def test_filters(ranked: Served, query: dict[str, Any], values: list[float]) -> None:
    assert [row["value"]["value"] for row in rows(ranked, **query)] == values


def test_a_quality_gate_leaves_out_what_lost_more_or_was_not_measured(service: Served) -> None:
    quality = {"top1_agreement": a_metric("top1_agreement", 0.97), "kld_mean": a_metric("kld_mean", 0.02)}
    service.submit()
    made = [generated(10, 0), a_result(tokens(20) | quality, index=1, stack=("int8_weight_only",))]
    service.finish(service.claim(), *made)
    for query in ({"min_top1": 0.97}, {"max_kld": 0.02}):
        (row,) = rows(service, **query)
        assert (row["value"]["value"], row["top1_agreement"], row["kld_mean"]) == (20, 0.97, 0.02)
    for query in ({"min_top1": 0.98}, {"max_kld": 0.01}):
        assert not rows(service, **query)


def test_the_page_says_once_for_each_board_why_it_has_no_quality(ranked: Served) -> None:
    page = ranked.client.get("/", headers=HTML).text
    assert page.count("The weights are random, so quality was not measured.") == 1
    assert page.count("matmul decodes nothing, so there is no quality.") == 1
    assert 'data-label="Top-1"' not in page


def test_pages_and_the_link_to_the_next(ranked: Served) -> None:
    answer = ranked.client.get("/v1/leaderboard", params={"limit": 3, "technique": "bf16"})
    assert "link" not in answer.headers
    values, path = [], "/v1/leaderboard?limit=1&technique=bf16"
    while path:
        answer = ranked.client.get(path)
        values += [(row["rank"], row["value"]["value"]) for row in answer.json()["boards"][0]["rows"]]
        path = answer.links.get("next", {}).get("url", "")
    assert values == [(1, 90), (2, 30), (3, 20)]


def test_csv_holds_the_raw_figures(ranked: Served) -> None:
    answer = ranked.client.get("/v1/leaderboard", params={"format": "csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    records = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(record["metric"], float(record["value"])) for record in records] == [
        *(("tokens_per_s", value) for value in (90, 30, 20, 10)),
        ("tflops", 2),
    ]
    assert records[0]["techniques"] == "bf16"


def test_markdown_is_a_table_for_each_board(ranked: Served) -> None:
    answer = ranked.client.get("/v1/leaderboard", params={"format": "md"})
    assert answer.headers["content-type"].startswith("text/markdown")
    assert "| bf16 + torch_compile |" in answer.text
    assert answer.text.count("**Leaderboard by ") == 2
    assert (
        "Not ranked: output_invalid (1). Invalid results are listed with include_invalid=true." in answer.text
    )
    shown = ranked.client.get("/v1/leaderboard?format=md&include_invalid=true").text
    assert "invalid: output_invalid" in shown


def test_a_board_links_to_all_of_its_rows_with_the_same_filters(ranked: Served) -> None:
    for found in boards(ranked, technique="bf16", limit=1, clean=False):
        whole = ranked.client.get(found["links"]["self"]).json()["boards"]
        assert [board["workload_digest"] for board in whole] == [found["workload_digest"]]
        assert whole[0]["row_count"] == found["row_count"] == 3
        following = ranked.client.get(found["links"]["next"]).json()["boards"]
        assert [row["rank"] for row in following[0]["rows"]] == [2]


@pytest.mark.parametrize(
    ("query", "close"),
    [
        ({"technique": "int8_wieght"}, "int8_weight_only"),
        ({"model": "gpt2"}, "preset:gpt2"),
        ({"model": "preset:gpt3"}, "preset:gpt2"),
        ({"workload": "matmull"}, "matmul"),
        ({"backend": "torhc"}, "torch"),
        ({"hardware": "1x Tset CPU"}, "1x Test CPU"),
        ({"source": "wroker"}, "worker"),
        ({"metric": "tokens_per_sec"}, "tokens_per_s"),
        ({"tecnique": "bf16"}, "technique"),
    ],
)
def test_a_filter_that_names_nothing_known_is_refused_with_what_is_close_first(
    ranked: Served, query: dict[str, str], close: str
) -> None:
    answer = ranked.client.get("/v1/leaderboard", params=query)
    assert answer.status_code == 422
    (entry,) = answer.json()["errors"]
    assert entry["field"] == next(iter(query))
    assert entry["valid"][0] == close
    assert f"Did you mean {close}" in entry["message"]
    assert len(set(entry["valid"])) == len(entry["valid"])


def test_every_unknown_filter_is_named_and_an_unknown_board_is_refused(ranked: Served) -> None:
    query = {"workload": "0" * 64, "hardware": "quantum", "model": "preset:gpt2"}
    errors = ranked.client.get("/v1/leaderboard", params=query).json()["errors"]
    assert {entry["field"] for entry in errors} == {"workload", "hardware"}
    (board,) = boards(ranked, workload=boards(ranked)[0]["workload_digest"])
    assert board["workload"]["kind"] == "generate"


def test_a_list_of_boards_has_a_link_to_the_next(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "BOARDS", 2)
    service.submit()
    made = [a_result(tokens(n + 1), index=n, size=n, stack=(f"t{n}",)) for n in range(3)]
    service.finish(service.claim(), *made, a_result(tokens(9), index=3, size=0, stack=("t4",)))
    sizes, path = [], "/v1/leaderboard?limit=1"
    while path:
        answer = service.client.get(path)
        sizes.append([board["workload"]["size"] for board in answer.json()["boards"]])
        path = answer.links.get("next", {}).get("url", "")
    assert sizes == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("*/*", "application/json"),
        ("text/csv", "text/csv"),
        ("text/markdown;q=0.4, text/csv;q=0.9", "text/csv"),
        ("text/html, application/json;q=0.9, text/csv;q=0.1", "application/json"),
        ("text/csv;q=nonsense", "application/json"),
        ("text/csv;q=0", "application/json"),
        ("image/png", "application/json"),
    ],
)
def test_the_form_follows_the_header_accept(any_service: Served, accept: str, media_type: str) -> None:
    answer = any_service.client.get("/v1/leaderboard", headers={"Accept": accept})
    assert answer.headers["content-type"].split(";")[0] == media_type
    assert "Accept" in answer.headers["vary"]


def test_a_form_in_the_query_wins_over_the_header(any_service: Served) -> None:
    answer = any_service.client.get("/v1/leaderboard?format=md", headers={"Accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/markdown")


def test_no_cell_runs_in_a_spreadsheet_or_breaks_a_table(service: Served) -> None:
    hostile = ["=1+1", "+1", "-1", "@x", "\t=1", "a|b", "a\nb", "<script>"]
    service.submit()
    made = [generated(n + 1, n, hardware=name) for n, name in enumerate(hostile)]
    service.finish(service.claim(), *made)
    text = service.client.get("/v1/leaderboard?format=csv").text
    cells = [record["hardware"] for record in csv.DictReader(io.StringIO(text, newline=""))]
    assert len(cells) == len(hostile)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    table = [
        line for line in service.client.get("/v1/leaderboard?format=md").text.splitlines() if line[:1] == "|"
    ]
    assert len(table) == len(hostile) + 2
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "<script>" not in "".join(table)


# ---- A leaderboard with four models, two machines and a careless rerun; and withdrawals.


MODELS = ("preset:gpt2", "preset:opt-125m", "bundled:tiny", "hub:org/name@abc")
LAPTOP, SERVER = "1x Test CPU", "1x Test GPU"
STACKS = {(): 10.0, ("bf16",): 20.0, ("int8_weight_only",): 40.0}
CARELESS = (VerdictWarning.SINGLE_REPLICATE, VerdictWarning.FEW_SAMPLES)


def speed(value: float, *, sure: bool = True, **changes: Any) -> Result:
    interval = (0.99 * value, 1.01 * value) if sure else None
    careful: dict[str, Any] = {"warnings": (), "replicates": 5}
    return a_result({"tokens_per_s": a_metric("tokens_per_s", value, interval)}, **careful | changes)


@pytest.fixture
def four_models(service: Served) -> Served:
    """Each model with three stacks on two machines, then a careless rerun of one of them and a disturbed result."""
    made = [
        speed(
            value * (1 + position) * (3 if hardware == SERVER else 1),
            model=model,
            stack=stack,
            hardware=hardware,
        )
        for position, model in enumerate(MODELS)
        for hardware in (LAPTOP, SERVER)
        for stack, value in STACKS.items()
    ]
    careless: dict[str, Any] = {
        "warnings": CARELESS,
        "replicates": 1,
        "measured_at": NOON + timedelta(days=1),
        "sure": False,
    }
    made.append(speed(9000.0, model="preset:gpt2", hardware=LAPTOP, **careless))
    made.append(speed(5000.0, model="preset:gpt2", stack=("fp16",), sure=False, warnings=CARELESS))
    disturbed: dict[str, Any] = {"valid": False, "reasons": (VerdictReason.FOREIGN_PROCESS,)}
    made.append(speed(7000.0, model="preset:gpt2", stack=("torch_compile",), **disturbed))
    service.submit()
    numbered = [
        result.model_copy(update={"variant": result.variant.model_copy(update={"index": index})})
        for index, result in enumerate(made)
    ]
    service.finish(service.claim(), *numbered)
    return service


def by_model(boards: tuple[Board, ...]) -> dict[str | None, Board]:
    return {board.model: board for board in boards}


@pytest.mark.slow
def test_models_are_never_ranked_against_each_other_and_machines_are_a_column(four_models: Served) -> None:
    with Client(four_models.url) as client:
        boards = by_model(client.leaderboard().boards)
        assert set(boards) == set(MODELS)
        tiny = boards["bundled:tiny"]
        assert [(row.rank, row.hardware, row.label) for row in tiny.rows] == [
            (1, SERVER, "int8_weight_only"),
            (2, SERVER, "bf16"),
            (3, LAPTOP, "int8_weight_only"),
            (4, SERVER, "baseline"),
            (5, LAPTOP, "bf16"),
        ]
        assert tiny.row_count == 6
        (laptop,) = client.leaderboard(workload=tiny.workload_digest, hardware="cpu").boards
        assert [(row.rank, row.label) for row in laptop.rows] == [
            (1, "int8_weight_only"),
            (2, "bf16"),
            (3, "baseline"),
        ]
        assert len(list(client.leaderboard_rows())) == 4 * 6 + 1


@pytest.mark.slow
def test_a_careless_rerun_and_a_row_without_an_interval_outrank_nothing(four_models: Served) -> None:
    with Client(four_models.url) as client:
        (board,) = client.leaderboard(model="preset:gpt2").boards
        assert [(row.rank, row.value.value) for row in board.rows] == [
            *enumerate((120.0, 60.0, 40.0, 30.0, 20.0, 10.0), start=1),
            (7, 5000.0),
        ]
        assert board.rows[5].earlier == 1
        assert board.not_ranked == {"foreign_process": 1}
        (everything,) = client.leaderboard(
            model="preset:gpt2", include_history=True, include_invalid=True
        ).boards
        assert [(row.rank, row.standing, row.value.value, row.reasons) for row in everything.rows[-2:]] == [
            (None, "earlier", 9000.0, ()),
            (None, "invalid", 7000.0, ("foreign_process",)),
        ]
        (clean,) = client.leaderboard(model="preset:gpt2", clean=True).boards
        assert [row.value.value for row in clean.rows] == [120.0, 60.0, 40.0, 30.0, 20.0, 10.0]


@pytest.mark.slow
def test_a_withdrawn_result_is_gone_with_its_reason_and_the_next_best_takes_its_place(
    four_models: Served,
) -> None:
    with Client(four_models.url) as client:
        baseline = {"model": "preset:gpt2", "hardware": "cpu"}
        (board,) = client.leaderboard(**baseline).boards
        careful = next(row for row in board.rows if row.label == "baseline")
        gone = client.withdraw_result(careful.result_id, "The fan was broken.")
        assert (gone.withdrawn_by, gone.job_id) == ("a caller without a key", careful.job_id)
        assert client.withdraw_result(careful.result_id, "Another reason.") == gone
        (board,) = client.leaderboard(**baseline).boards
        rerun = next(row for row in board.rows if row.label == "baseline")
        assert (rerun.value.value, rerun.warnings, rerun.rank) == (9000.0, CARELESS, 3)
        for read in (client.result, client.samples, client.artifacts):
            with pytest.raises(ServiceError, match=r"was withdrawn on .*: The fan was broken") as caught:
                read(careful.result_id)
            assert caught.value.status == 410
        with pytest.raises(ServiceError) as caught:
            client.compare(careful.result_id, rerun.result_id)
        assert caught.value.status == 410
        assert careful.job_id is not None
        assert careful.result_id not in [result["id"] for result in client.results(careful.job_id)]


def test_a_running_job_is_not_withdrawn(service: Served) -> None:
    job = service.submit()
    service.claim()
    answer = service.client.delete(job["links"]["self"], params={"reason": "too slow"})
    assert (answer.status_code, "cancel it" in answer.json()["detail"]) == (409, True)
    assert service.client.get(job["links"]["self"]).json()["state"] == "running"
