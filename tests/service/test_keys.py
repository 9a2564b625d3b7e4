"""Keys and limits: who may call, how often, until when; and the commands that make and end keys."""

import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api.__main__ import main
from optigpu.store import keys
from optigpu.store.database import Database
from optigpu.store.tables import ApiKey
from optigpu.vocabulary import ConflictError, NotFoundError, utc_now
from tests.service.records import NOON
from tests.service.serving import MATMUL, Served, serving

BOOTSTRAP = "a-first-key-that-is-long-enough"
READS = ("/v1/jobs", "/v1/leaderboard", "/v1/workers", "/v1/hardware", "/metrics")
PAST = timedelta(seconds=-1)
DAY = timedelta(days=1)


@pytest.fixture
def keyed(guarded: Served) -> dict[str, str]:
    """A key of each scope, by its scope."""
    with guarded.database.write() as session:
        return {scope: keys.create(session, f"for {scope}", [scope]) for scope in ("read", "submit", "admin")}


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"Authorization": f"Bearer {key}"}


def status(service: Served, key: str) -> int:
    return service.client.get("/v1/jobs", headers=bearer(key)).status_code


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


@pytest.mark.parametrize("header", ["Bearer wrong", "Bearer", "Basic eDp5", "Bearer é"])
def test_a_wrong_key_opens_nothing(service: Served, keyed: dict[str, str], header: str) -> None:
    answer = service.client.get("/v1/jobs", headers=[(b"Authorization", header.encode("latin-1"))])
    assert answer.status_code == 401


def test_a_revoked_key_opens_nothing(service: Served, keyed: dict[str, str]) -> None:
    with service.database.write() as session:
        admin = next(key for key in keys.list_(session) if key.name == "for admin")
        keys.revoke(session, admin.id)
    assert service.client.get("/v1/jobs", headers=bearer(keyed["admin"])).status_code == 401
    assert service.client.get("/v1/jobs", headers=bearer(keyed["read"])).status_code == 200


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_key_of_the_environment_that_was_revoked_is_refused_without_a_write(database_url: str) -> None:
    with serving(database_url, api_key=BOOTSTRAP) as served:
        assert served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 200
        with served.database.write() as session:
            keys.revoke(session, keys.list_(session)[0].id)
        with served.database.write() as session:
            session.execute(update(ApiKey).values(name="being renamed"))
            assert served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 401


@pytest.mark.slow
def test_too_many_calls_are_refused_until_later(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="3/day") as served:
        answers = [served.client.get("/v1/jobs") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 86400
        assert answers[-1].headers["content-type"] == "application/problem+json"
        assert served.client.get("/healthz").status_code == 200


@pytest.mark.slow
def test_guessing_keys_is_limited_by_address_and_each_key_has_its_own_limit(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="3/day", api_key=BOOTSTRAP) as served:
        guesses = [served.client.get("/v1/jobs", headers=bearer(f"guess {n}")).status_code for n in range(5)]
        assert guesses == [401, 401, 401, 429, 429]
        assert served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 200


def test_redis_counts_for_all_processes_together(tmp_path: Path, redis_url: str) -> None:
    common: dict[str, Any] = {"rate_limit": "4/day", "redis_url": redis_url, "api_key": BOOTSTRAP}
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, **common) as one, serving(url, **common) as two:
        calls = [served.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)) for served in (one, two) * 3]
    assert [call.status_code for call in calls] == [200] * 4 + [429] * 2


def test_a_key_that_has_expired_opens_nothing_and_does_not_open_the_service(guarded: Served) -> None:
    with guarded.database.write() as session:
        expired = keys.create(session, "expired", ["admin"], PAST)
    assert status(guarded, expired) == 401
    assert guarded.client.get("/v1/jobs").status_code == 401, "it was the last key"
    with guarded.database.write() as session:
        valid = keys.create(session, "valid", ["admin"], DAY)
    assert status(guarded, valid) == 200


def test_a_rotated_key_and_its_successor_are_both_valid_for_a_while(guarded: Served) -> None:
    with guarded.database.write() as session:
        old = keys.create(session, "someone", ["submit"], 30 * DAY)
        (before,) = keys.list_(session)
        new = keys.rotate(session, before.id, grace=DAY)
        first, second = keys.list_(session)
    assert (second.name, second.scopes) == (before.name, before.scopes)
    assert second.expires_at is not None
    assert first.expires_at is not None
    assert abs(first.expires_at - utc_now() - DAY) < timedelta(minutes=1)
    assert abs(second.expires_at - utc_now() - 30 * DAY) < timedelta(minutes=1)
    assert [status(guarded, key) for key in (old, new)] == [200, 200]
    with guarded.database.write() as session:
        newest = keys.rotate(session, second.id, grace=timedelta(0))
    assert [status(guarded, key) for key in (old, new, newest)] == [200, 401, 200]


def test_a_grace_gives_no_key_a_longer_life(database: Database) -> None:
    with database.write() as session:
        keys.create(session, "someone", ["read"], DAY)
        (key,) = keys.list_(session)
        keys.rotate(session, key.id, grace=7 * DAY)
        assert keys.list_(session)[0].expires_at == key.expires_at


def test_only_a_valid_key_has_a_successor(database: Database) -> None:
    with database.write() as session:
        keys.create(session, "revoked", ["read"])
        keys.create(session, "expired", ["read"], PAST)
        revoked, expired = keys.list_(session)
        keys.revoke(session, revoked.id)
        for key in (revoked, expired):
            with pytest.raises(ConflictError, match="no longer valid"):
                keys.rotate(session, key.id, grace=DAY)
        with pytest.raises(NotFoundError, match="There is no key"):
            keys.rotate(session, "none", grace=DAY)


@pytest.mark.slow
def test_keys_are_rotated_on_the_command_line_and_the_audit_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", f"sqlite:///{tmp_path / 'optigpu.db'}")
    monkeypatch.delenv("OPTIGPU_REDIS_URL", raising=False)
    assert main(["keys", "create", "someone", "--scope", "submit", "--expires", "90d"]) == 0
    first = capsys.readouterr().out.strip()
    main(["keys", "list"])
    line = capsys.readouterr().out
    key_id = line.split()[0]
    assert "expires 2" in line
    assert first not in line
    assert main(["keys", "rotate", key_id, "--grace", "2h"]) == 0
    printed = capsys.readouterr()
    second = printed.out.strip()
    assert second.startswith("og_")
    assert "The old one is valid until" in printed.err
    assert main(["keys", "revoke", key_id]) == 0
    assert main(["audit", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["key.revoked" in lines[0], "key.rotated" in lines[1], len(lines)] == [True, True, 2]
    assert all(key_id in line for line in lines)
    assert not any(key in line for line in lines for key in (first, second))
    assert main(["keys", "revoke", "no-such-key"]) == 1
    assert "There is no key" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["keys"],
        ["keys", "create", "a\nb"],
        ["keys", "create", "a", "--expires", "0d"],
        ["keys", "create", "a", "--scope", "root"],
        ["keys", "rotate", "id", "--grace", "31d"],
        ["audit", "--limit", "0"],
        ["devices"],
        ["devices", "invite", "--expires", "0m"],
        ["devices", "invite", "--name", "a\nb"],
    ],
)
def test_a_wrong_command_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"usage: python -m api {words[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["keys", "devices"])
def test_a_wrong_setting_is_named(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTIGPU_PORT", "http")
    assert main([group, "list"]) == 1
    assert capsys.readouterr().err == "OPTIGPU_PORT: The value is not a whole number.\n"


def test_a_key_is_shown_once_and_stored_as_a_hash(database: Database) -> None:
    with database.write() as session:
        plain = keys.create(session, "laptop", ["read", "submit"])
        row = session.scalars(select(ApiKey)).one()
        stored = [str(getattr(row, column.name)) for column in ApiKey.__table__.columns]
        keys.note_uses(session, {stored_id(session): NOON})
        info = keys.verify(session, plain)
    assert plain.startswith("og_")
    assert len(plain) == 46
    assert not [value for value in stored if plain[8:] in value]
    assert info is not None
    assert (info.name, info.scopes, info.prefix, info.last_used_at) == (
        "laptop",
        ("read", "submit"),
        plain[:7],
        NOON,
    )


def stored_id(session: Session) -> str:
    """The id of the only key."""
    return session.scalars(select(ApiKey.id)).one()
