"""Keys that end: by themselves, and after their successor was made."""

from datetime import timedelta
from pathlib import Path

import pytest

from api.__main__ import main
from optigpu.store import audit, keys
from optigpu.store.database import Database
from optigpu.vocabulary import ConflictError, NotFoundError, utc_now
from tests.service.serving import Served

PAST = timedelta(seconds=-1)
DAY = timedelta(days=1)


def status_with(service: Served, key: str) -> int:
    return service.client.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"}).status_code


def test_a_key_that_has_expired_opens_nothing_and_does_not_open_the_service(guarded: Served) -> None:
    with guarded.database.write() as session:
        expired = keys.create(session, "expired", ["admin"], PAST)
    assert status_with(guarded, expired) == 401
    assert guarded.client.get("/v1/jobs").status_code == 401, "it was the last key"
    with guarded.database.write() as session:
        valid = keys.create(session, "valid", ["admin"], DAY)
    assert status_with(guarded, valid) == 200


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
    assert [status_with(guarded, key) for key in (old, new)] == [200, 200]
    with guarded.database.write() as session:
        newest = keys.rotate(session, second.id, grace=timedelta(0))
    assert [status_with(guarded, key) for key in (old, new, newest)] == [200, 401, 200]


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


def test_keys_are_rotated_on_the_command_line_and_the_audit_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", url)
    monkeypatch.delenv("OPTIGPU_REDIS_URL", raising=False)
    assert main(["keys", "create", "someone", "--scope", "submit", "--expires", "90d"]) == 0
    first = capsys.readouterr().out.strip()
    main(["keys", "list"])
    line = capsys.readouterr().out
    key_id = line.split()[0]
    assert "expires 2" in line
    assert main(["keys", "rotate", key_id, "--grace", "2h"]) == 0
    printed = capsys.readouterr()
    second = printed.out.strip()
    assert second.startswith("og_")
    assert "The old one is valid until" in printed.err
    assert main(["keys", "revoke", key_id]) == 0
    opened = Database(url)
    with opened.read() as session:
        assert keys.verify(session, first) is None
        assert keys.verify(session, second) is not None
        page = audit.list_(session)
    opened.close()
    actions = [change.action for change in page.changes]
    assert actions == ["key.revoked", "key.rotated", "key.created", "key.created"]
    assert {change.target for change in page.changes if change.action != "key.created"} == {key_id}
    assert main(["audit", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["key.revoked" in lines[0], "key.rotated" in lines[1], len(lines)] == [True, True, 2]
    assert not any(key in line for line in lines for key in (first, second))


@pytest.mark.parametrize(
    "words",
    [
        ["keys"],
        ["keys", "create", "a\nb"],
        ["keys", "create", "a", "--expires", "0d"],
        ["keys", "create", "a", "--scope", "root"],
        ["keys", "rotate", "id", "--grace", "31d"],
        ["audit", "--limit", "0"],
    ],
)
def test_a_wrong_command_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"usage: python -m api {words[0]}" in capsys.readouterr().err
