"""RESULTS.md and the files beside it say what was measured and what is there."""

import re

import pytest
import yaml

from optigpu import __version__
from tests.pages import ROOT


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
