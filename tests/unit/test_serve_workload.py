"""serve as it is asked for: what is refused, what it expands to, and what identifies it."""

from typing import Any

import pytest
from pydantic import ValidationError

from optigpu.documents.shapes import ModelFacts
from optigpu.job.spec import JobSpec
from optigpu.models.facts import known_facts
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import OptiGPUError
from optigpu.workloads.serve import Serve

LINE = '{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2}'


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rates": [0]}, "rates.0: 0 is too small"),
        ({"rates": [1e9]}, "rates.0: 1000000000 is too large; the most is 100000"),
        ({"rates": [-1]}, "rates.0: -1 is too small"),
        ({"rates": ["NaN"]}, "rates.0"),
        ({"rates": []}, "rates: It has too few items"),
        ({"rates": [2, 1]}, "the lowest first"),
        ({"rates": [2, 2]}, "name each rate once"),
        ({"rates": None}, "the scenario Server needs rates"),
        ({"scenario": "Offline", "rates": [1]}, "rates is of the scenario Server"),
        ({"scenario": "closed"}, "the scenario closed needs clients"),
        ({"clients": 2}, "clients is of the scenario closed"),
        ({"scenario": "closed", "clients": 0}, "clients: 0 is too small"),
        ({"ttft_s": 0}, "ttft_s: 0 is too small; it must be more than 0"),
        ({"tpot_s": -1}, "tpot_s: -1 is too small"),
        ({"new_tokens": 1}, "new_tokens: 1 is too small"),
        ({"new_tokens": 8, "new_tokens_most": 4}, "new_tokens_most is less than new_tokens"),
        ({"queries": 0}, "queries: 0 is too small"),
        ({"queries": None}, "the scenario Server needs queries"),
        ({"scenario": "trace"}, "the scenario trace needs trace"),
        ({"trace": LINE}, "trace is of the scenario trace"),
        ({"scenario": "trace", "trace": LINE + "\n{"}, "line 2 of the trace is wrong"),
        (
            {"scenario": "trace", "trace": LINE.replace("0,", "-3,")},
            "line 1 of the trace is wrong: arrival_s",
        ),
        ({"scenario": "trace", "trace": LINE, "queries": 3}, "a trace says queries itself"),
        ({"scenario": "server"}, "scenario"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field(given: dict[str, Any], words: str) -> None:
    with pytest.raises((OptiGPUError, ValidationError, ValueError)) as error:
        JobSpec.model_validate({"workload": {"kind": "serve"} | given, "model": "preset:gpt2"})
    assert words in str(error.value)


def test_each_rate_is_a_variant_and_others_are_one() -> None:
    expanded = Serve(rates=(1, 2.5)).expand()
    assert [each.label for each in expanded] == ["1/s", "2.5/s"]
    assert len({str(each.identity()) for each in expanded}) == 2
    (offline,) = Serve(scenario="Offline").expand()
    assert offline.label == ""


def test_the_longest_query_must_fit_the_context() -> None:
    facts = known_facts(parse_reference("preset:gpt2"))
    assert isinstance(facts, ModelFacts)
    assert Serve(prompt_tokens=512, new_tokens=512).check(facts) is None
    assert "1025" in (Serve(prompt_tokens=512, prompt_tokens_most=513, new_tokens=512).check(facts) or "")


@pytest.mark.parametrize("name", ["static_kv_cache", "no_kv_cache", "torch_compile", "speculative_decoding"])
def test_a_technique_of_whole_batches_is_refused_when_the_job_is_posted(name: str) -> None:
    with pytest.raises((OptiGPUError, ValueError), match="sequences join and leave"):
        JobSpec.model_validate(
            {"workload": {"kind": "serve"}, "model": "preset:gpt2", "stack": [{"name": name}]}
        )
