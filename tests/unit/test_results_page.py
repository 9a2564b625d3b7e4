"""RESULTS.md and the files beside it say what was measured and what is there."""

import json
import re

import pytest
import yaml

from benchmarks.model_sizes import NO_TURNS, RANDOM, SIZES, TOO_SMALL, TRAINED, markdown
from optigpu import __version__
from optigpu.vocabulary import Document
from tests.pages import ROOT

PAGE = ROOT / "RESULTS.md"
STUDY: Document = json.loads((ROOT / "docs" / "results" / "model_sizes.json").read_text())


def test_the_tables_of_the_page_are_those_of_the_file() -> None:
    (shown,) = re.findall(
        r"<!-- figures: python -m benchmarks.model_sizes --show .*? -->\n(.*?)<!-- end -->",
        PAGE.read_text(),
        re.DOTALL,
    )
    assert shown.strip() == markdown(STUDY).strip()


def test_the_study_is_over_every_size_and_a_trained_model_in_eight_and_four_bits() -> None:
    found = {(each["model"], each["bits"]) for each in STUDY["studies"]}
    assert found == {
        (model, bits) for model in (*(f"preset:{size}" for size in SIZES), TRAINED) for bits in (8, 4)
    }


@pytest.mark.parametrize("study", STUDY["studies"], ids=lambda study: f"{study['model']} {study['bits']}")
def test_what_is_null_has_a_reason_and_what_was_measured_has_none(study: Document) -> None:
    assert (study["ratio"] is None) == (study["speed_reason"] is not None)
    assert (study["kld_mean"] is None) == (study["quality_reason"] is not None)
    assert {study["speed_reason"], study["quality_reason"]} <= {None, NO_TURNS, RANDOM, TOO_SMALL}
    assert (study["kld_mean"] is None) == study["model"].startswith("preset:")
    assert study["weight_bytes"] < study["fp32_bytes"]
    assert study["layers"]


def test_the_citation_is_of_this_version_and_its_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == __version__
    assert (citation["license"], citation["cff-version"]) == ("MIT", "1.2.0")
    assert citation["authors"]


def test_the_requirements_are_the_package_in_the_tested_versions() -> None:
    lines = [
        line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")
    ]
    assert lines == ["-c constraints.txt", "-e ."]
    assert (ROOT / "constraints.txt").is_file()


@pytest.mark.parametrize("name", ["RESULTS.md", "CONTRIBUTING.md"])
def test_links_of_a_page_at_the_root_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
