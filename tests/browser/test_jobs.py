"""Jobs in a browser: from the form to the results, live over a restart of the service, and by the keyboard alone."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect

from optigpu.documents.events import Printed
from optigpu.store import outcomes
from optigpu.store.database import Database
from optigpu.store.leases import Lease
from optigpu.vocabulary import JobState
from tests.browser.stored import HOSTILE
from tests.browser.test_pages import CONTRAST, HANDLERS, NARROW, RULES, SCRIPTS, violations
from tests.service.processes import address, stop, watched_processes
from tests.service.records import a_metric, a_plan, a_result, an_outcome
from tests.service.serving import MATMUL, Served, serving

pytestmark = pytest.mark.slow

ADMIN = "a-first-key-that-is-long-enough"
MEASURED = {
    "measure.replicates": "1",
    "measure.min_seconds": "0.05",
    "measure.max_seconds": "1",
    "measure.rel_ci": "1",
    "measure.meters": "latency",
    "limits.wait_for_quiet_s": "0",
}
"""Over in seconds."""
PAGES = ("/keys", "/alerts?result={result}", "/webhooks?webhook={webhook}", "/jobs/{job}")
"""As an administrator sees them; what everybody sees is on the list of stored.py."""
HOSTILE_URL = f"https://hooks.example.org/?{HOSTILE.replace(' ', '+')}"
FOLLOWED_WITHIN_MS = 30_000


@dataclass
class Guarded:
    """A service with keys, and a window of an administrator who is signed in."""

    served: Served
    window: BrowserContext
    said: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def guarded(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    url = f"sqlite:///{tmp_path_factory.mktemp('jobs') / 'optigpu.db'}"
    with serving(url, api_key=ADMIN) as served, browser.new_context(base_url=served.url) as window:
        window.set_default_timeout(10_000)
        found = Guarded(served, window)
        served.client.headers["Authorization"] = f"Bearer {ADMIN}"
        with window.new_page() as page:
            page.goto("/jobs")
            page.get_by_role("link", name="Sign in").first.click()
            page.get_by_label("Key").fill(ADMIN)
            page.get_by_role("button", name="Sign in").click()
            expect(page).to_have_url(f"{served.url}/jobs")
        window.on("console", lambda message: found.said.append(message.text))
        window.on("dialog", lambda dialog: found.said.append(dialog.message))
        yield found


@pytest.fixture
def page(guarded: Guarded) -> Iterator[Page]:
    """A tab of the administrator."""
    with guarded.window.new_page() as opened:
        yield opened


@contextmanager
def without_scripts(browser: Browser, url: str) -> Iterator[Page]:
    with browser.new_context(base_url=url, java_script_enabled=False) as window, window.new_page() as page:
        yield page


@pytest.fixture(scope="module")
def hostile(guarded: Guarded) -> dict[str, str]:
    """A job that has ended, its result, a rule for it and a webhook, whose every text is an attempt to run a script."""
    served = guarded.served
    hook = {"url": HOSTILE_URL, "events": ["job.finished"]}
    webhook = served.client.post("/v1/webhooks", json=hook)
    assert webhook.status_code == 201, webhook.text
    job_id = served.submit(MATMUL | {"name": HOSTILE, "note": HOSTILE})["id"]
    result = a_result(
        {"tflops": a_metric("tflops", 1.0)}, workload="matmul", stack=(HOSTILE,), hardware=HOSTILE
    )
    lease = served.claim()
    assert lease.job_id == job_id
    with served.database.write() as session:
        outcomes.plan(session, lease, a_plan(HOSTILE))
        outcomes.printed(session, lease, Printed(index=0, text=HOSTILE))
    served.finish(lease, result, reason=HOSTILE)
    rule = {"result_id": result.id, "kind": "threshold", "threshold": 0.5}
    assert served.client.post("/v1/alerts", json=rule).status_code == 201
    return {"job": job_id, "result": result.id, "webhook": webhook.json()["id"]}


@pytest.mark.long
@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_accessible_narrow_dark_and_runs_nothing_of_others(
    guarded: Guarded, hostile: dict[str, str], page: Page, path: str
) -> None:
    page.goto(path.format(**hostile))
    assert violations(page, RULES) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page, CONTRAST) == []
    for summary in page.locator("main summary").all():
        summary.click()
    page.set_viewport_size(NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    assert page.evaluate(SCRIPTS) == page.evaluate(HANDLERS) == page.locator("[style], style").count() == 0
    assert [said for said in guarded.said if "Password forms" not in said] == []


@pytest.mark.long
def test_a_job_goes_from_the_form_to_its_results(tmp_path: Path, browser: Browser) -> None:
    """With the worker of an embedded service. A stranger presses a preset, changes it, and posts it."""
    variables = {"OPTIGPU_DATA_DIR": str(tmp_path), "OPTIGPU_LOG_LEVEL": "WARNING"}
    with ExitStack() as stack:
        processes = stack.enter_context(watched_processes(tmp_path, variables))
        service = processes.start("api", "--port", "0")
        url = address(processes)
        window = stack.enter_context(browser.new_context(base_url=url))
        page = stack.enter_context(window.new_page())
        page.goto("/jobs/new?preset=first")
        assert "4 variants" in page.locator("#preview").inner_text()
        page.get_by_text("How to measure, limits, and everything else").click()
        for name, value in (MEASURED | {"model": "preset:tiny-llama-test"}).items():
            page.locator(f'[id="{name}"]').fill(value)
        page.locator('[id="workload.generate.new_tokens"]').fill("4")
        page.get_by_label("int8_weight_only").uncheck()
        expect(page.locator("#preview")).to_contain_text("2 variants")
        expect(page.locator("#as-json")).to_contain_text('"new_tokens": 4')
        page.get_by_role("button", name="Post the job").click()
        expect(page).to_have_url(re.compile(r"/jobs/0\w+"))
        expect(page.locator("#state")).to_contain_text("succeeded", timeout=120_000)
        assert page.locator("#variants tbody tr").count() == 2
        assert page.locator("#variants svg.bar").count() == 2
        page.get_by_role("link", name="What each layer bought").click()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.go_back()
        page.locator("#variants a.row").first.click()
        page.get_by_role("link", name="Measure this again here").click()
        assert page.locator('[id="model"]').input_value() == "preset:tiny-llama-test"
        stop(service)


def test_a_page_follows_a_job_over_a_restart_of_the_service(tmp_path: Path, browser: Browser) -> None:
    """The stream goes on after the last event that the page has seen; nobody loads the page again."""
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    asked: list[Request] = []
    with ExitStack() as stack:
        window = stack.enter_context(browser.new_context())
        page = stack.enter_context(window.new_page())
        page.on("request", lambda each: asked.append(each))
        with serving(url) as served:
            job_id = served.submit(MATMUL | {"name": "followed"})["id"]
            page.goto(f"{served.url}/jobs/{job_id}")
            page.evaluate("window.stays = true")
            lease = served.claim()
            with served.database.write() as session:
                outcomes.plan(session, lease, a_plan("baseline", "other"))
            save(served.database, lease, 0)
            expect(page.locator("#variants svg.bar")).to_have_count(1, timeout=FOLLOWED_WITHIN_MS)
            port = int(served.url.rsplit(":", 1)[1])
        with closing(Database(url)) as database:
            save(database, lease, 1)
        with serving(url, port) as served:
            expect(page.locator("#variants svg.bar")).to_have_count(2, timeout=FOLLOWED_WITHIN_MS)
            with served.database.write() as session:
                outcomes.finish(session, lease, JobState.SUCCEEDED)
            expect(page.locator("#state")).to_contain_text("succeeded", timeout=FOLLOWED_WITHIN_MS)
        assert page.evaluate("window.stays")
        assert page.title().startswith("succeeded: followed")
        seen = [each.all_headers().get("last-event-id") for each in asked if "/events?" in each.url]
        assert seen[0] is None
        assert int(seen[-1] or 0) > 0, "the browser says what it has seen"


def save(database: Database, lease: Lease, index: int) -> None:
    """A variant of a job is measured."""
    metric = a_metric("tflops", 1.0 + index, (0.9 + index, 1.1 + index))
    result = a_result({"tflops": metric}, index=index, stack=("bf16",) * index, workload="matmul")
    with database.write() as session:
        outcomes.save_outcome(session, lease, an_outcome(result))


@pytest.mark.long
def test_everything_can_be_done_by_the_keyboard(guarded: Guarded, page: Page) -> None:
    before = guarded.served.count_jobs()
    page.goto("/jobs/new")
    page.locator("input[name=workload][value=generate]").focus()
    for _ in range(20):
        if page.locator("input[name=workload][value=matmul]").is_checked():
            break
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "workload.matmul.sizes"
    page.keyboard.type("64")
    expect(page.locator("#as-json")).to_contain_text("64")
    page.get_by_role("button", name="Post the job").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/jobs/0\w+"))
    assert guarded.served.count_jobs() == before + 1
    page.get_by_role("button", name="Cancel the job").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_contain_text("cancelled")


def test_what_is_wrong_stands_at_its_field_while_one_types(guarded: Guarded, page: Page) -> None:
    page.goto("/jobs/new?preset=matmul")
    sizes = page.locator('[id="workload.matmul.sizes"]')
    sizes.fill("many")
    error = page.locator('[id="error-workload.matmul.sizes"]')
    expect(error).to_have_text("'many' is not a whole number.")
    expect(sizes).to_have_attribute("aria-invalid", "true")
    assert sizes.evaluate("each => each === document.activeElement"), "the cursor stays"
    sizes.fill("64")
    expect(error).to_be_hidden()
    expect(page.locator("#preview")).to_contain_text("2 variants")


@pytest.mark.long
def test_all_of_it_works_without_scripts(guarded: Guarded, browser: Browser) -> None:
    with without_scripts(browser, guarded.served.url) as page:
        page.goto("/login")
        page.get_by_label("Key").fill(ADMIN)
        page.get_by_role("button", name="Sign in").click()
        page.goto("/jobs/new")
        page.get_by_label("matmul").check()
        page.locator('[id="workload.matmul.sizes"]').fill("none")
        page.get_by_role("button", name="Check").click()
        assert "is not a whole number" in page.locator('[id="error-workload.matmul.sizes"]').inner_text()
        assert page.get_by_label("matmul").is_checked()
        page.locator('[id="workload.matmul.sizes"]').fill("64")
        page.get_by_role("button", name="Post the job").click()
        assert page.locator("noscript meta[http-equiv=refresh], meta[http-equiv=refresh]").count() == 1
        page.get_by_role("button", name="Cancel the job").click()
        assert "cancelled" in page.locator("#state").inner_text()
        page.get_by_role("button", name="Sign out").click()
        page.goto("/jobs")
        assert page.get_by_role("heading", level=1).inner_text() == "Unauthorized"
