"""Who serves, and who may ask."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from optigpu.store import jobs, keys, workers
from optigpu.store.database import Database
from optigpu.store.tables import ApiKey
from optigpu.vocabulary import NotFoundError, StoreError
from tests.service.records import NOON, a_gpu_worker, a_spec, a_worker


def test_a_worker_is_listed_from_its_start_until_it_leaves(database: Database) -> None:
    has: dict[str, Any] = {"packages": ("bitsandbytes",), "models": ("path:mine",), "downloads": False}
    with database.write() as session:
        workers.register(session, a_gpu_worker(**has), now=NOON)
        (view,) = workers.list_(session, now=NOON + timedelta(seconds=30))
        assert (view.gpus, view.backends, view.vram_bytes) == (("NVIDIA H200",), ("torch",), 141 * 10**9)
        assert (view.packages, view.models, view.downloads) == tuple(has.values())
        assert (view.started_at, view.seen_at, view.alive, view.job_id) == (NOON, NOON, True, None)
        workers.leave(session, view.id)
        assert workers.list_(session) == []


def test_a_silent_worker_is_listed_as_dead_and_after_a_week_forgotten(database: Database) -> None:
    with database.write() as session:
        workers.register(session, a_worker("silent"), now=NOON)
        workers.register(session, a_worker("alive"), now=NOON)
        job_id = jobs.submit(session, a_spec()).job.id
        workers.seen(session, "alive", job_id, now=NOON + timedelta(seconds=31))
        views = {view.id: view for view in workers.list_(session, now=NOON + timedelta(seconds=31))}
        assert (views["silent"].alive, views["alive"].alive, views["alive"].job_id) == (False, True, job_id)
        workers.register(session, a_worker("new"), now=NOON + timedelta(days=7, seconds=1))
        assert {view.id for view in workers.list_(session)} == {"alive", "new"}


def test_registering_again_replaces_what_was_said(database: Database) -> None:
    with database.write() as session:
        workers.register(session, a_worker(version="1"), now=NOON)
        workers.register(session, a_worker(version="2"), now=NOON + timedelta(hours=1))
        (view,) = workers.list_(session)
    assert (view.version, view.started_at) == ("2", NOON + timedelta(hours=1))


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


def test_two_keys_are_never_the_same(database: Database) -> None:
    with database.write() as session:
        assert len({keys.create(session, "same name", ["read"]) for _ in range(20)}) == 20


def test_an_unknown_or_revoked_key_is_none(database: Database) -> None:
    with database.write() as session:
        assert not keys.any(session)
        plain = keys.create(session, "laptop", ["read"])
        info = keys.verify(session, plain)
        assert info is not None
        assert keys.any(session)
        for wrong in (plain[:-1], plain + "x", "", "\x00", "\ud800", info.prefix):
            assert keys.verify(session, wrong) is None
        keys.revoke(session, info.id)
        assert keys.verify(session, plain) is None
        assert not keys.any(session)
        assert keys.list_(session) == []
        with pytest.raises(NotFoundError, match="no key nonsense"):
            keys.revoke(session, "nonsense")


def test_the_newest_use_of_a_key_stays_whoever_notes_it(database: Database) -> None:
    with database.write() as session:
        keys.create(session, "laptop", ["read"])
        key_id = stored_id(session)
        noted = []
        for seconds in (0, 60, 30):
            keys.note_uses(session, {key_id: NOON + timedelta(seconds=seconds), "revoked meanwhile": NOON})
            noted.append(keys.list_(session)[0].last_used_at)
    assert noted == [NOON, NOON + timedelta(seconds=60), NOON + timedelta(seconds=60)]


def test_a_key_is_verified_without_a_write(database: Database) -> None:
    with database.write() as session:
        plain = keys.create(session, "laptop", ["read"])
    with database.read() as session:
        info = keys.verify(session, plain)
        session.commit()
    assert info is not None
    assert info.last_used_at is None


def test_a_key_that_somebody_chose_is_entered_once_and_stays_revoked(database: Database) -> None:
    plain = "chosen-by-a-person-1234"
    with database.write() as session:
        for _ in range(2):
            keys.ensure(session, plain, "bootstrap", ["admin"])
        (info,) = keys.list_(session)
        keys.revoke(session, info.id)
        keys.ensure(session, plain, "bootstrap", ["admin"])
        assert keys.verify(session, plain) is None


def test_a_short_key_and_an_unknown_scope_are_refused(database: Database) -> None:
    with database.write() as session:
        with pytest.raises(StoreError, match="at least 20 characters"):
            keys.ensure(session, "password", "bootstrap", ["admin"])
        with pytest.raises(ValueError, match="'root' is not a valid Scope"):
            keys.create(session, "laptop", ["root"])


def stored_id(session: Session) -> str:
    """The id of the only key."""
    return session.scalars(select(ApiKey.id)).one()
