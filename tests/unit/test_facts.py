"""What a result says of how its variant ran: typed where code reads it, with a reason where nothing is known."""

from pathlib import Path

import numpy as np
import pytest

from optigpu.documents.facts import (
    EXPLAINED,
    NO_MODEL,
    NOT_RECORDED,
    MeterFacts,
    RunFacts,
    WeightFacts,
)
from optigpu.documents.roofline import Bound
from optigpu.documents.shapes import Footprint, ImageFacts, ImageFootprint, ModelFacts

DECODER = ModelFacts("gpt2", 64, 2, 4, 4, 100, 128, True, 16, 256, False, 64)
IMAGES = ImageFacts("vit", 3, 32, 10, True)


def test_a_note_of_a_field_s_name_fills_it_and_every_other_is_kept_for_people() -> None:
    facts = RunFacts.gathered({"dtype": "float32", "attention_kernels": ["flash"], "int8_layers": 3})
    assert (facts.dtype, facts.attention_kernels) == ("float32", ("flash",))
    assert facts.recorded == {"int8_layers": 3}


def test_what_nobody_noted_has_a_reason() -> None:
    facts = RunFacts.gathered({"dtype": "float32", "reasons": {"threads": "The engine chooses."}})
    assert facts.reasons["threads"] == "The engine chooses."
    assert set(facts.reasons) == set(EXPLAINED) - {"dtype"}
    assert facts.why_null("weights") == NOT_RECORDED
    assert RunFacts.gathered({}, unknown=NO_MODEL).why_null("weights") == NO_MODEL


@pytest.mark.parametrize(
    ("note", "kept"),
    [
        ((1, (2.5, None)), [1, [2.5, None]]),
        ({1: {"a": True}}, {"1": {"a": True}}),
        (float("nan"), "nan"),
        ([float("-inf")], ["-inf"]),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (Bound.MEMORY, "memory"),
        (Path("a") / "b", "a/b"),
    ],
)
def test_a_note_for_people_never_costs_the_measurement(note: object, kept: object) -> None:
    facts = RunFacts.gathered({"note": note})
    assert facts.recorded == {"note": kept}
    assert RunFacts.model_validate_json(facts.model_dump_json()) == facts
    assert MeterFacts.model_validate({"recorded": {"note": note}}).recorded == {"note": kept}


@pytest.mark.parametrize("footprint", [Footprint(DECODER, 10, 2), ImageFootprint(IMAGES, 10, 99, 3072)])
def test_facts_survive_as_json(footprint: Footprint | ImageFootprint) -> None:
    facts = RunFacts(
        dtype="bfloat16",
        footprint=footprint,
        weights=WeightFacts(hash="a", hash_of="files"),
        image_shape=(3, 2, 2),
    )
    again = RunFacts.model_validate_json(facts.model_dump_json())
    assert again == facts
    assert type(again.footprint) is type(footprint)
