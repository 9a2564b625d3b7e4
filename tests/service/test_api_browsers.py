"""What browsers are told: strict headers on every answer, and no other origin unless it is listed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.settings import SettingsError, read_settings
from tests.service.serving import MATMUL, Served, serving

ORIGIN = "https://bench.example.org"
STRANGER = "https://elsewhere.example.org"
PAGES = ("/", "/docs")
"""They load their own style sheet and scripts; whatever else is sent loads nothing."""


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service behind https that pages of one origin may call."""
    url = f"sqlite:///{tmp_path_factory.mktemp('cors') / 'optigpu.db'}"
    with serving(url, cors_origins=(ORIGIN,), hsts_s=3600) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 200), ("/v1/jobs", 200), ("/nothing", 404), ("/v1/jobs/x", 422), ("/docs", 200)],
)
def test_every_answer_has_strict_headers(any_service: Served, path: str, status: int) -> None:
    answer = any_service.client.get(path)
    assert answer.status_code == status
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    policy = answer.headers["content-security-policy"]
    source = "'self'" if path in PAGES else "'none'"
    assert policy.startswith(f"default-src {source}; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "strict-transport-security" not in answer.headers


def test_https_alone_is_asked_for_where_it_is_set(listed: Served) -> None:
    assert listed.client.get("/v1/jobs").headers["strict-transport-security"] == "max-age=3600"


def preflight(service: Served, origin: str) -> dict[str, str]:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    answer = service.client.options(
        "/v1/jobs", headers=headers | {"Access-Control-Request-Headers": "authorization"}
    )
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


def test_no_page_of_another_origin_may_call_by_default(any_service: Served) -> None:
    assert preflight(any_service, ORIGIN) == {}
    answer = any_service.client.get("/v1/jobs", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_of_an_origin_that_is_listed_may_call(listed: Served) -> None:
    allowed = preflight(listed, ORIGIN)
    assert allowed["access-control-allow-origin"] == ORIGIN
    assert "Authorization" in allowed["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed
    answer = listed.client.post("/v1/jobs", json=MATMUL, headers={"Origin": ORIGIN})
    assert answer.status_code == 202
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "Location" in answer.headers["access-control-expose-headers"]
    wrong = listed.client.post("/v1/jobs", json={}, headers={"Origin": ORIGIN})
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (422, ORIGIN)


def test_a_page_of_any_other_origin_may_not(listed: Served) -> None:
    assert "access-control-allow-origin" not in preflight(listed, STRANGER)
    answer = listed.client.post("/v1/jobs", json=MATMUL, headers={"Origin": STRANGER})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origins", ["*", "null", "bench.example.org", "https://bench.example.org/", "https://*.example.org"]
)
def test_what_is_no_origin_is_refused(monkeypatch: pytest.MonkeyPatch, origins: str, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTIGPU_CORS_ORIGINS", origins)
    with pytest.raises(SettingsError, match="OPTIGPU_CORS_ORIGINS"):
        read_settings(database_url=f"sqlite:///{tmp_path / 'optigpu.db'}")
