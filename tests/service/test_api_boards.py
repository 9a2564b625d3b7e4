"""A leaderboard with four models, two machines and a careless rerun, as a client sees it; and withdrawals."""

from datetime import timedelta
from typing import Any

import pytest

from optigpu.client import Client
from optigpu.documents.result import Result, VerdictReason, VerdictWarning
from optigpu.documents.views import Board
from optigpu.vocabulary import ServiceError
from tests.service.records import NOON, a_metric, a_result
from tests.service.serving import Served

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
