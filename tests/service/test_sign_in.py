"""Signing in: a key becomes a cookie, and a cookie alone changes nothing."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import select, update

from api.auth import SIGN_IN, Seal
from api.pages import PAGES
from optigpu.store import keys, webhooks
from optigpu.store.database import Database
from optigpu.store.tables import ApiKey, SignIn
from optigpu.vocabulary import utc_now
from tests.service.conftest import emptied
from tests.service.pages import Browser, seal_on
from tests.service.serving import MATMUL, Served, serving

KEY = "a-first-key-that-is-long-enough"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def guarded(service_on_sqlite: Served) -> Iterator[Served]:
    """An empty service, whose keys are revoked at the end; `test_a_sign_in_is_stored_alike` is of both databases."""
    with emptied(service_on_sqlite) as served:
        yield served


@pytest.fixture
def made(guarded: Served) -> dict[str, str]:
    """A key of each scope, by its scope."""
    with guarded.database.write() as session:
        return {scope: keys.create(session, f"for {scope}", [scope]) for scope in ("read", "submit", "admin")}


@pytest.fixture
def browser(guarded: Served, made: dict[str, str]) -> Iterator[Browser]:
    """A browser that is signed in with the administrator's key."""
    with Browser(guarded) as found:
        assert found.sign_in(made["admin"]).status_code == 303
        yield found


def key_id(service: Served, name: str) -> str:
    with service.database.read() as session:
        return next(key.id for key in keys.list_(session) if key.name == name)


def test_a_key_becomes_a_cookie_that_opens_what_the_key_opens(guarded: Served, made: dict[str, str]) -> None:
    with Browser(guarded) as browser:
        browser.read("/jobs", 401)
        answer = browser.sign_in(made["read"])
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
        assert "Signed in with for read" in browser.read("/jobs")
        assert browser.client.get("/v1/jobs").status_code == 200
        assert browser.client.get("/v1/leaderboard").status_code == 200
        browser.read("/keys", 403)
    with guarded.database.read() as session:
        assert len(session.scalars(select(SignIn.hash)).all()) == 1


def test_no_script_reads_the_cookie_and_no_other_site_has_it_sent(
    guarded: Served, made: dict[str, str]
) -> None:
    with Browser(guarded) as browser:
        seal_page = browser.client.get("/login")
        signed = browser.sign_in(made["admin"])
    for answer in (seal_page, signed):
        (cookie,) = answer.headers.get_list("set-cookie")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Secure" not in cookie
        assert "Path=/" in cookie
        assert made["admin"] not in cookie
    assert "Max-Age=28800" in signed.headers["set-cookie"]
    with guarded.database.read() as session:
        (stored,) = session.scalars(select(SignIn.hash)).all()
    assert stored not in signed.headers["set-cookie"], "the database has only its hash"


@pytest.mark.slow
def test_behind_https_the_cookie_goes_over_nothing_else(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, api_key=KEY, hsts_s=3600, root_path="/bench") as served, Browser(served) as browser:
        page = browser.client.get("/bench/login")
        assert "Secure" in page.headers["set-cookie"]
        assert "Path=/bench" in page.headers["set-cookie"]
    with serving(url, api_key=KEY) as served, Browser(served, **{"X-Forwarded-Proto": "https"}) as browser:
        assert "Secure" in browser.client.get("/login").headers["set-cookie"]


@pytest.mark.parametrize("key", ["", "wrong", "é\x00"])
def test_a_wrong_key_signs_nobody_in(guarded: Served, made: dict[str, str], key: str) -> None:
    with Browser(guarded) as browser:
        answer = browser.sign_in(key)
        assert answer.status_code == 401
        assert SIGN_IN not in browser.client.cookies
        assert 'role="alert">' in answer.text


@pytest.mark.slow
def test_guesses_at_the_page_are_counted_as_those_of_calls(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    with serving(url, api_key=KEY, rate_limit="3/day") as served, Browser(served) as browser:
        texts = [browser.sign_in("wrong").text for _ in range(4)]
    assert ["try again in" in text for text in texts] == [False, False, False, True]


@pytest.mark.parametrize(
    "next_", ["//evil.example.org", "/\\evil.example.org", "https://evil.example.org", "x"]
)
def test_it_leads_to_no_other_service(guarded: Served, made: dict[str, str], next_: str) -> None:
    with Browser(guarded) as browser:
        assert browser.client.get("/login", params={"next": next_}).status_code == 422
        answer = browser.send("/login", "/login", {"key": made["read"], "next": next_})
    assert answer.status_code == 422
    assert "location" not in answer.headers


def test_signing_out_ends_it_in_the_database_too(guarded: Served, browser: Browser) -> None:
    stolen = browser.client.cookies[SIGN_IN]
    assert browser.send("/jobs", "/logout").status_code == 303
    browser.read("/jobs", 401)
    assert httpx.get(f"{guarded.url}/v1/jobs", cookies={SIGN_IN: stolen}).status_code == 401


def test_a_sign_in_ends_with_its_key(guarded: Served, browser: Browser) -> None:
    browser.read("/jobs")
    with guarded.database.write() as session:
        keys.revoke(session, key_id(guarded, "for admin"))
    browser.read("/jobs", 401)
    assert browser.client.get("/v1/jobs").status_code == 401


@pytest.mark.slow
def test_a_sign_in_is_stored_alike(database: Database) -> None:
    """It ends when its hours are over, with its key, and when the key's own time is over."""
    with database.write() as session:
        plain = [keys.create(session, name, ["read"]) for name in ("a", "b", "c", "d")]
        known = [key for each in plain if (key := keys.verify(session, each))]
        tokens = [keys.sign_in(session, key.id, timedelta(hours=1)) for key in known]
        keys.sign_out(session, tokens[0])
        keys.revoke(session, known[1].id)
        session.execute(update(ApiKey).where(ApiKey.id == known[2].id).values(expires_at=utc_now()))
    with database.read() as session:
        found = [keys.signed_in(session, token) for token in (*tokens, "x", "\ud800")]
    assert [key and key.name for key in found] == [None, None, None, "d", None, None]
    with database.write() as session:
        session.execute(update(SignIn).values(expires_at=utc_now()))
        assert keys.signed_in(session, tokens[3]) is None
        keys.sign_in(session, known[3].id, timedelta(hours=1))
        assert len(session.scalars(select(SignIn.hash)).all()) == 1, "those that are over are forgotten"


FORMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("/jobs/new", {"workload": "matmul", "ask": "post"}),
    ("/alerts", {"kind": "change_point"}),
    ("/logout", {}),
    ("/login", {"key": KEY}),
    ("/jobs/{id}/cancel", {}),
    ("/jobs/{id}/retry", {}),
    ("/keys/{id}/revoke", {}),
    ("/keys/{id}/rotate", {"key": KEY}),
    ("/alerts/{id}/delete", {}),
    ("/webhooks", {"url": "https://hooks.example.org", "events": "job.finished"}),
    ("/webhooks/{id}/delete", {}),
)
"""Every form that changes something."""


def test_every_form_is_on_the_list() -> None:
    routes = [route for module in PAGES for route in module.router.routes]
    posting = {
        route.path for route in routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    }
    assert posting == {path for path, _ in FORMS}


@pytest.mark.parametrize(("path", "fields"), FORMS, ids=[path for path, _ in FORMS])
def test_a_form_of_another_page_changes_nothing(
    guarded: Served, browser: Browser, path: str, fields: dict[str, str]
) -> None:
    """Without the seal, with that of another browser, and with the right one sent from another site."""
    job = guarded.submit(None, Authorization=f"Bearer {the_admin(guarded)}")
    place = path.replace("{id}", job["id"] if "jobs" in path else key_id(guarded, "for admin"))
    own = seal_on(browser.read("/keys"))
    before = snapshot(guarded)
    others = (None, "same-origin"), (Seal("another").token, "same-origin")
    for seal, site in (*others, (own, "cross-site"), (own, "same-site")):
        sent = fields if seal is None else {"csrf": seal, **fields}
        answer = browser.client.post(place, data=sent, headers=FORM | {"Sec-Fetch-Site": site})
        assert answer.status_code == 403, path
    assert snapshot(guarded) == before


def the_admin(service: Served) -> str:
    with service.database.write() as session:
        return keys.create(session, "another admin", ["admin"])


def snapshot(service: Served) -> tuple[Any, ...]:
    """What a form could have changed."""
    with service.database.read() as session:
        known, hooks = keys.list_(session), webhooks.list_(session)
    return service.count_jobs(), [key.id for key in known], [key.expires_at for key in known], hooks


def test_a_cookie_alone_calls_nothing_that_changes_anything(guarded: Served, browser: Browser) -> None:
    """A page of a sibling domain is of the same site, so that its calls carry the cookie."""
    key = the_admin(guarded)
    job = guarded.submit(None, Authorization=f"Bearer {key}")
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/jobs", {"json": MATMUL}),
        ("POST", f"/v1/jobs/{job['id']}/cancel", {"data": {}}),
        ("DELETE", f"/v1/jobs/{job['id']}?reason=Because.", {}),
        ("POST", "/v1/webhooks", {"json": {"url": "https://hooks.example.org", "events": ["job.finished"]}}),
    ]
    for method, path, sent in calls:
        answer = browser.client.request(method, path, **sent)
        assert (answer.status_code, "seal" in answer.text or "form" in answer.text) == (403, True), path
    assert guarded.count_jobs() == 1
    seal = {"X-CSRF-Token": seal_on(browser.read("/keys"))}
    assert browser.client.post("/v1/jobs", json=MATMUL, headers=seal).status_code == 202
    own = {"Authorization": f"Bearer {key}"}
    assert browser.client.post("/v1/jobs", json=MATMUL, headers=own).status_code == 202, "a key needs no seal"


def test_a_form_is_read_within_bounds(guarded: Served, browser: Browser) -> None:
    seal = seal_on(browser.read("/keys"))
    many = "&".join(["a=1"] * 3000)
    for content, status in ((f"csrf={seal}&{many}", 400), (b"csrf=\xff", 400), (b"x" * 1_000_001, 413)):
        assert browser.client.post("/logout", content=content, headers=FORM).status_code == status
    assert browser.client.post("/logout", json={"csrf": seal}).status_code == 415


def test_a_service_without_keys_says_so_and_its_forms_are_sealed_all_the_same(service: Served) -> None:
    with Browser(service) as browser:
        assert "has no keys yet" in browser.read("/login")
        asked = {"workload": "matmul", "workload.matmul.sizes": "64", "ask": "post"}
        assert browser.client.post("/jobs/new", data=asked).status_code == 403
        answer = browser.send("/jobs/new", "/jobs/new", asked)
        assert answer.status_code == 303, answer.text
    assert service.count_jobs() == 1


def test_an_administrator_sees_keys_and_revokes_them(guarded: Served, browser: Browser) -> None:
    page = browser.read("/keys")
    assert all(f"for {scope}" in page for scope in ("read", "submit", "admin"))
    gone = key_id(guarded, "for submit")
    assert browser.send("/keys", f"/keys/{gone}/revoke").status_code == 303
    assert "for submit" not in browser.read("/keys")
    changes = browser.client.get("/v1/audit").json()["changes"]
    assert [each["action"] for each in changes[:2]] == ["key.revoked", "key.signed_in"]
    assert changes[0]["name"] == "for admin"


def test_a_browser_makes_no_key_unless_its_own_is_shown_again(
    guarded: Served, browser: Browser, made: dict[str, str]
) -> None:
    """So that who has the browser, and not the key, leaves no key behind."""
    place = f"/keys/{key_id(guarded, 'for submit')}/rotate"
    for key in ("", "wrong", made["submit"]):
        assert browser.send("/keys", place, {"key": key}).status_code == 403
    answer = browser.send("/keys", place, {"key": made["admin"], "grace": "1 hour"})
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    with guarded.database.read() as session:
        old, new = (key for key in keys.list_(session) if key.name == "for submit")
    assert old.expires_at is not None
    assert old.expires_at - utc_now() < timedelta(hours=1)
    assert new.scopes == old.scopes
    assert new.prefix in answer.text
    assert new.prefix + "…" in browser.read("/keys")
    assert made["submit"] not in answer.text
