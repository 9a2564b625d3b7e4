"""leaderboard: the boards of the service that is named, or of the one in the environment, as tables and frames."""

from typing import Any

import pytest

import optigpu
from tests.unit.made_results import a_row
from tests.unit.scripted_service import Answer, Call, scripted_service


def one_board(call: Call) -> Answer:
    rows = [a_row(label=label).model_dump(mode="json") for label in ("bf16", "int8_weight_only")]
    board = {
        "workload_digest": "w",
        "workload": {"kind": "generate"},
        "model": "preset:gpt2",
        "metric": "tokens_per_s",
        "unit": "1/s",
        "better": "higher",
        "rows": rows,
        "row_count": 2,
    }
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
