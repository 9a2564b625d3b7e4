"""Pages of the leaderboard come from memory as long as nothing has changed, and never longer."""

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from sqlalchemy import event

from optigpu.store import keys
from optigpu.store.withdrawals import Withdrawal, withdraw_result
from tests.service.records import a_sure_speed, entered
from tests.service.serving import Served, serving

PAGE = "/v1/leaderboard"


def test_a_page_is_read_once_and_again_when_a_result_came_or_went(service: Served) -> None:
    entered(service.database, first := a_sure_speed(1.0))
    with counted(service) as read:
        one, two = service.client.get(PAGE), service.client.get(PAGE)
        assert (one.content, one.headers["etag"]) == (two.content, two.headers["etag"])
        assert len(read) == 1
        entered(service.database, a_sure_speed(2.0, stack=("bf16",)))
        three = service.client.get(PAGE)
        assert three.headers["etag"] != two.headers["etag"]
        assert [row["value"]["value"] for row in three.json()["boards"][0]["rows"]] == [2.0, 1.0]
        with service.database.write() as session:
            withdraw_result(session, first.id, Withdrawal(reason="wrong", withdrawn_by="alice"))
        four = service.client.get(PAGE)
        assert [row["value"]["value"] for row in four.json()["boards"][0]["rows"]] == [2.0]
        assert len(read) == 3


def test_a_client_that_has_the_page_gets_no_body(service: Served) -> None:
    entered(service.database, a_sure_speed(1.0))
    first = service.client.get(PAGE)
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "private, no-cache"
    assert {"Accept", "Authorization"} <= {name.strip() for name in first.headers["vary"].split(",")}
    for known in (tag, f'"other", W/{tag}', "*"):
        again = service.client.get(PAGE, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert service.client.get(PAGE, headers={"If-None-Match": '"other"'}).status_code == 200
    entered(service.database, a_sure_speed(2.0))
    assert service.client.get(PAGE, headers={"If-None-Match": tag}).status_code == 200


@pytest.mark.slow
def test_each_form_and_encoding_is_a_page_of_its_own(service: Served) -> None:
    for number in range(20):
        entered(service.database, a_sure_speed(float(number), stack=(f"t{number}",)))
    forms = {
        (encoding, accept): service.client.get(PAGE, headers={"Accept-Encoding": encoding, "Accept": accept})
        for _ in range(2)
        for encoding in ("identity", "gzip")
        for accept in ("application/json", "text/csv")
    }
    assert len({answer.headers["etag"] for answer in forms.values()}) == 4
    assert forms["gzip", "text/csv"].text == forms["identity", "text/csv"].text
    with httpx.stream("GET", service.url + PAGE, headers={"Accept-Encoding": "gzip"}) as raw:
        packed = b"".join(raw.iter_raw())
    assert gzip.decompress(packed) == forms["identity", "application/json"].content


def test_a_refused_page_is_not_kept(service: Served) -> None:
    assert service.client.get(f"{PAGE}?technique=nonsense").status_code == 422
    entered(service.database, a_sure_speed(1.0, stack=("nonsense",)))
    assert service.client.get(f"{PAGE}?technique=nonsense").status_code == 200


def test_a_kept_page_is_for_those_who_may_read(service: Served) -> None:
    assert service.client.get(PAGE).status_code == 200
    with service.database.write() as session:
        plain = keys.create(session, "alice", ["read"])
    assert service.client.get(PAGE).status_code == 401
    bearer = {"Authorization": f"Bearer {plain}"}
    assert [service.client.get(PAGE, headers=bearer).status_code for _ in range(2)] == [200, 200]
    with service.database.write() as session:
        (key,) = keys.list_(session)
        keys.revoke(session, key.id)
    # Loopback needs no key once there is none, but what was revoked stays refused.
    assert [service.client.get(PAGE, headers=bearer).status_code for _ in range(2)] == [401, 401]
    assert service.client.get(PAGE).status_code == 200


@pytest.mark.slow
def test_kept_pages_count_against_the_limit(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("limited")
    with serving(f"sqlite:///{folder / 'optigpu.db'}", rate_limit="10/day") as limited:
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda _: limited.client.get(PAGE), range(15)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 10 + [429] * 5
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 86400


def test_requests_that_come_together_share_a_look_at_the_keys(service: Served) -> None:
    """Sixty-four at once: those that wait while one look is under way have the next one in common."""
    with service.database.write() as session:
        plain = keys.create(session, "alice", ["read"])
    bearer = {"Authorization": f"Bearer {plain}"}
    engine = service.app.state.service.database._engine
    looks: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "FROM revisions" in statement:
            looks.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    with ThreadPoolExecutor(16) as pool:
        statuses = set(pool.map(lambda _: service.client.get(PAGE, headers=bearer).status_code, range(64)))
    event.remove(engine, "before_cursor_execute", note)
    assert statuses == {200}
    assert 1 <= len(looks) < 64


@contextmanager
def counted(service: Served) -> Iterator[list[str]]:
    """The statements that read boards."""
    engine, found = service.app.state.service.database._glancing, []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "FROM boards" in statement:
            found.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield found
    event.remove(engine, "before_cursor_execute", note)


@pytest.fixture(autouse=True)
def without_keys(service: Served) -> Iterator[None]:
    yield
    with service.database.write() as session:
        for key in keys.list_(session):
            keys.revoke(session, key.id)
