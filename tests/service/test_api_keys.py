"""Keys and limits: who may call, and how often."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from api import key_command as command
from api.key_uses import KeyUses
from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.store.errors import StoreUnavailableError
from optigpu.store.tables import ApiKey
from tests.service.serving import MATMUL, Served, serving

BOOTSTRAP = "a-first-key-that-is-long-enough"


@pytest.fixture
def keyed(service: Served) -> Iterator[dict[str, str]]:
    """A key of each scope, by its scope."""
    with service.database.write() as session:
        made = {scope: keys.create(session, f"for {scope}", [scope]) for scope in ("read", "submit", "admin")}
    yield made
    with service.database.write() as session:
        for key in keys.list_(session):
            keys.revoke(session, key.id)


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"Authorization": f"Bearer {key}"}


def test_a_stray_key_is_no_harm_where_there_are_none(service: Served) -> None:
    """As a client sends that has OPTIGPU_API_KEY of another service."""
    assert service.client.get("/v1/jobs", headers=bearer("of-another-service")).status_code == 200
    assert (
        service.client.post("/v1/jobs", json=MATMUL, headers=bearer("of-another-service")).status_code == 202
    )


def test_as_soon_as_there_is_a_key_every_call_needs_one(service: Served, keyed: dict[str, str]) -> None:
    for path in ("/v1/jobs", "/v1/leaderboard", "/v1/workers", "/v1/schema/job", "/metrics"):
        answer = service.client.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.headers["content-type"] == "application/problem+json"
        assert service.client.get(path, headers=bearer(keyed["read"])).status_code == 200
    assert service.client.post("/v1/jobs", json=MATMUL).status_code == 401
    assert service.client.get("/healthz").status_code == 200
    assert service.count_jobs() == 0


@pytest.mark.parametrize(("scope", "status"), [("read", 403), ("submit", 202), ("admin", 202)])
def test_a_scope_says_what_a_key_may_do(
    service: Served, keyed: dict[str, str], scope: str, status: int
) -> None:
    answer = service.client.post("/v1/jobs", json=MATMUL, headers=bearer(keyed[scope]))
    assert answer.status_code == status
    if status == 403:
        assert "submit" in answer.json()["detail"]
        assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]


@pytest.mark.parametrize(("scope", "status"), [("read", 403), ("submit", 403), ("admin", 200)])
def test_only_an_admin_may_withdraw_and_is_remembered(
    service: Served, keyed: dict[str, str], scope: str, status: int
) -> None:
    job = service.submit(None, **bearer(keyed["submit"]))
    place = f"/v1/jobs/{job['id']}?reason=A%20duplicate."
    answer = service.client.delete(place, headers=bearer(keyed[scope]))
    assert answer.status_code == status
    if status == 200:
        assert (answer.json()["withdrawn_by"], answer.json()["reason"]) == ("for admin", "A duplicate.")
    else:
        assert "admin" in answer.json()["detail"]
        assert service.client.get(job["links"]["self"], headers=bearer(keyed["read"])).status_code == 200


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer", "Basic eDp5", "Bearer " + "x" * 3000, "Bearer é"]
)
def test_a_wrong_key_opens_nothing(service: Served, keyed: dict[str, str], header: str) -> None:
    answer = service.client.get("/v1/jobs", headers=[(b"Authorization", header.encode("latin-1"))])
    assert answer.status_code == 401


def test_a_caller_without_a_key_learns_nothing_of_the_body(service: Served, keyed: dict[str, str]) -> None:
    for request in ({"content": b"{"}, {"json": {"workload": {"kind": "x"}}}):
        assert service.client.post("/v1/jobs", **request).status_code == 401


def test_a_revoked_key_opens_nothing(service: Served, keyed: dict[str, str]) -> None:
    with service.database.write() as session:
        admin = next(key for key in keys.list_(session) if key.name == "for admin")
        keys.revoke(session, admin.id)
    assert service.client.get("/v1/jobs", headers=bearer(keyed["admin"])).status_code == 401
    assert service.client.get("/v1/jobs", headers=bearer(keyed["read"])).status_code == 200


READS = ("/v1/jobs", "/v1/leaderboard", "/v1/workers", "/v1/hardware", "/metrics")


def test_a_read_waits_for_no_writer(service: Served, keyed: dict[str, str]) -> None:
    """Another transaction holds the key's row (on SQLite the whole database) until every read has been answered."""
    with service.database.write() as session:
        session.execute(update(ApiKey).values(name="being renamed"))
        answers = [service.client.get(path, headers=bearer(keyed["read"])).status_code for path in READS]
    assert answers == [200] * len(READS)


def test_a_request_leaves_the_time_of_its_key(service: Served, keyed: dict[str, str]) -> None:
    for scope in ("read", "submit", "read"):
        assert service.client.get("/v1/jobs", headers=bearer(keyed[scope])).status_code == 200
    service.app.state.service.key_uses.write()
    with service.database.read() as session:
        used = [key.scopes for key in keys.list_(session) if key.last_used_at is not None]
    assert used == [("read",), ("submit",)]


def test_uses_are_written_together_and_once(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []
    monkeypatch.setattr(keys, "note_uses", lambda _, uses: written.append(list(uses)))
    uses = KeyUses(service.database)
    for key_id in ("a", "b", "a"):
        uses.note(key_id)
    assert written == []
    uses.write()
    uses.write()
    assert written == [["a", "b"]]


def test_uses_that_could_not_be_written_are_written_later(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise StoreUnavailableError("The database is away.")

    written: list[list[str]] = []
    uses = KeyUses(service.database)
    uses.note("a")
    monkeypatch.setattr(keys, "note_uses", away)
    uses.write()
    uses.note("b")
    monkeypatch.setattr(keys, "note_uses", lambda _, uses: written.append(list(uses)))
    uses.write()
    assert written == [["a", "b"]]


def test_the_last_uses_are_written_when_the_service_stops(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, api_key=BOOTSTRAP) as served:
        assert served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 200
    with closing(Database(url)) as database, database.read() as session:
        (key,) = keys.list_(session)
    assert key.last_used_at is not None


def test_two_keys_may_choose_the_same_idempotency_key(service: Served, keyed: dict[str, str]) -> None:
    chosen = {"Idempotency-Key": "same"}
    ids = {
        service.submit({"workload": {"kind": "matmul", "sizes": [size]}}, **chosen, **bearer(keyed[scope]))[
            "id"
        ]
        for scope, size in (("submit", 64), ("admin", 128))
    }
    assert len(ids) == 2


def test_the_page_shows_no_data_where_keys_are_needed(service: Served, keyed: dict[str, str]) -> None:
    job_id = service.submit(None, **bearer(keyed["submit"]))["id"]
    page = service.client.get("/jobs", headers={"Accept": "text/html"})
    assert page.status_code == 401
    assert job_id not in page.text
    assert "needs a key" in page.text


@pytest.mark.slow
def test_the_environment_names_a_first_key(database_url: str) -> None:
    with serving(database_url, api_key=BOOTSTRAP) as served:
        assert served.client.get("/v1/jobs").status_code == 401
        answers: list[int] = []

        def first_call() -> None:
            answers.append(
                httpx.get(f"{served.url}/v1/jobs", headers=bearer(BOOTSTRAP), timeout=30).status_code
            )

        threads = [threading.Thread(target=first_call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [200] * 8
        with served.database.read() as session:
            assert [key.name for key in keys.list_(session)] == ["OPTIGPU_API_KEY"]


def test_a_key_of_the_environment_that_was_revoked_is_refused_without_a_write(database_url: str) -> None:
    with serving(database_url, api_key=BOOTSTRAP) as served:
        assert served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 200
        with served.database.write() as session:
            keys.revoke(session, keys.list_(session)[0].id)
        with served.database.write() as session:
            session.execute(update(ApiKey).values(name="being renamed"))
            assert served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 401


@pytest.mark.slow
def test_a_service_that_others_reach_is_never_open(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", host="0.0.0.0") as served:
        assert served.client.get("/v1/jobs").status_code == 401
        assert served.client.get("/healthz", headers={"Host": "any.example"}).status_code == 200


def test_too_many_calls_are_refused_until_later(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="3/minute") as served:
        answers = [served.client.get("/v1/jobs") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
        assert answers[-1].headers["content-type"] == "application/problem+json"
        assert served.client.get("/healthz").status_code == 200


def test_guessing_keys_is_limited_by_address_and_each_key_has_its_own_limit(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="3/minute", api_key=BOOTSTRAP) as served:
        guesses = [served.client.get("/v1/jobs", headers=bearer(f"guess {n}")).status_code for n in range(5)]
        assert guesses == [401, 401, 401, 429, 429]
        assert served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 200


def test_redis_counts_for_all_processes_together(tmp_path: Path, redis_url: str) -> None:
    common: dict[str, Any] = {"rate_limit": "4/minute", "redis_url": redis_url, "api_key": BOOTSTRAP}
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, **common) as one, serving(url, **common) as two:
        calls = [served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)) for served in (one, two) * 3]
    assert [call.status_code for call in calls] == [200] * 4 + [429] * 2


def test_keys_are_made_listed_and_revoked_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", url)
    monkeypatch.delenv("OPTIGPU_REDIS_URL", raising=False)
    assert command.main(["create", "someone", "--scope", "submit"]) == 0
    plain = capsys.readouterr().out.strip()
    with serving(url) as served:
        assert served.client.get("/v1/jobs").status_code == 401
        assert served.client.post("/v1/jobs", json=MATMUL, headers=bearer(plain)).status_code == 202
        command.main(["list"])
        listed = capsys.readouterr().out.splitlines()[-1]
        assert "someone" in listed
        assert plain not in listed
        assert command.main(["revoke", listed.split()[0]]) == 0
        assert served.client.post("/v1/jobs", json=MATMUL, headers=bearer(plain)).status_code == 401
    assert command.main(["revoke", "no-such-key"]) == 1
    assert "There is no key" in capsys.readouterr().err


def test_the_keys_command_names_a_setting_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTIGPU_PORT", "http")
    assert command.main(["list"]) == 1
    assert capsys.readouterr().err == "OPTIGPU_PORT: The value is not a whole number.\n"
