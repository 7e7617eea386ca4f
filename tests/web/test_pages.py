"""The pages with figures in them: what they show, what they ask for, and that a hostile name stays text."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from backend.recipes import GptBytesConfig

pytestmark = pytest.mark.browser
WebServer = Any
HOSTILE = '<img src=x onerror="document.title=1">'
JOB: dict[str, Any] = {
    "id": "job-1",
    "name": "Shakespeare",
    "kind": "train",
    "recipe": "gpt-bytes",
    "config": {},
    "mode": "tiles",
    "state": "running",
    "reason": "",
    "step": 84,
    "steps": 200,
    "loss": 2.914,
    "first_loss": 5.61,
    "epoch": 1,
    "created_s": 1.7e9,
    "started_s": 1.7e9,
    "ended_s": None,
    "elapsed_s": 312.0,
    "samples_per_s": 61.3,
    "unit": "tokens",
    "tiles": 18230,
    "flop": 3.2e12,
    "gflops": 61.2,
    "tiles_per_s": 58.4,
    "devices": 3,
    "eta_s": 431.0,
    "offloaded_flop_share": 0.987,
    "bytes_per_step": 12.5e6,
    "wire": "bf16",
    "waiting": None,
    "sample": {"step": 50, "text": "def the(self, ne <b>"},
    "validation": {"step": 50, "value": 2.41},
    "has_checkpoint": True,
    "has_result": False,
}
DEVICE: dict[str, Any] = {
    "id": "dev-1",
    "name": "Quiet Otter",
    "online": True,
    "state": "ready",
    "reason": "",
    "job": "job-1",
    "kernel": "wasm-relaxed",
    "workers": 4,
    "flops": 3.1e10,
    "claimed_flops": 1.2e11,
    "measured_flops": 3.1e10,
    "down_bps": 6.1e7,
    "up_bps": 2.2e7,
    "rtt_s": 0.012,
    "accepted": 18230,
    "rejects": 0,
    "flop": 3.2e12,
    "credit": 7.4,
    "rac": 3.1,
    "first_seen_s": 1.7e9,
    "last_seen_s": 1.7e9,
    "quarantined_until_s": None,
}


def leader(rank: int, **over: Any) -> dict[str, Any]:
    row = {"rank": rank, "id": f"dev-{rank}", "name": f"Device {rank}", "flop": 1e15 / rank, "credit": 2000 / rank}
    return {**row, "rac": 900 / rank, "day_credit": 100 / rank, "online": rank % 2 == 1, **over}


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 2.5 + 3.1 * math.exp(-number / 60)}


def events(*pairs: tuple[str, Any]) -> str:
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in pairs)


def test_volunteer_page_says_what_will_run(page: Page, server: WebServer) -> None:
    server.api["/jobs"] = {"jobs": [{**JOB, "name": HOSTILE}], "total": 1}
    page.goto(server.url)
    link = page.get_by_role("link", name=HOSTILE)
    expect(link).to_have_attribute("href", "/jobs/job-1")
    expect(page.get_by_text("step 84 of 200")).to_be_visible()
    expect(page.get_by_text("weights and activations")).to_be_visible()
    expect(page.locator("#memory")).to_have_text("512 MiB")
    assert page.title() == "Volunteer · Tileweave"


def test_job_page_follows_the_events(page: Page, server: WebServer) -> None:
    server.api["/jobs/job-1"] = JOB
    server.api["/devices"] = {"devices": [DEVICE, {**DEVICE, "id": "x", "job": "other"}], "total": 2}
    server.api["/jobs/job-1/metrics"] = {"job": "job-1", "rows": [step(i) for i in range(85)]}
    done = {**JOB, "step": 200, "state": "succeeded", "loss": 2.123, "eta_s": None, "devices": 0}
    server.api["/jobs/job-1/events"] = events(
        ("step", step(199)), ("sample", {"step": 199, "text": HOSTILE}), ("job", done)
    )
    page.goto(f"{server.url}/jobs/job-1")
    expect(page.get_by_role("heading", level=1)).to_have_text("Shakespeare")
    expect(page.locator("#state")).to_have_text("Succeeded")
    expect(page.locator("#loss")).to_have_text("2.123")
    expect(page.locator("#first-loss")).to_have_text("from 5.610")
    expect(page.locator("#validation")).to_have_text("validation 2.410 at step 50")
    expect(page.locator("#bytes")).to_have_text("12.5 MB")
    expect(page.locator("#wire")).to_have_text("as bf16")
    expect(page.locator("#sample")).to_have_text(HOSTILE)
    expect(page.locator("#rate-unit")).to_have_text("Tokens per second")
    expect(page.locator("#fleet li")).to_have_count(1)
    expect(page.locator("#chart canvas")).to_be_visible()
    expect(page.locator("#no-steps")).to_be_hidden()
    expect(page.locator("#progress")).to_have_js_property("value", 1)
    expect(page.get_by_role("link", name="Metrics as CSV")).to_have_attribute(
        "href", "/api/v1/jobs/job-1/metrics?format=csv"
    )


@pytest.mark.parametrize(
    ("state", "over", "words"),
    [
        ("Queued", {"waiting": "waiting for its turn"}, "waiting for its turn"),
        ("Failed", {"reason": "loss is not finite at step 3"}, "loss is not finite at step 3"),
    ],
)
def test_job_page_says_why_nothing_moves(page: Page, server: WebServer, state: str, over: Any, words: str) -> None:
    unknown = dict.fromkeys(
        ("loss", "step", "gflops", "tiles", "eta_s", "samples_per_s", "unit", "sample", "validation", "bytes_per_step")
    )
    server.api["/jobs/job-1"] = {**JOB, **unknown, "state": state.lower(), **over}
    server.api["/jobs/job-1/metrics"] = {"job": "job-1", "rows": []}
    server.api["/jobs/job-1/events"] = events(("job", server.api["/jobs/job-1"]))
    server.api["/devices"] = {"devices": [], "total": 0}
    page.goto(f"{server.url}/jobs/job-1")
    expect(page.locator("#state")).to_have_text(state)
    expect(page.locator("#why")).to_have_text(words)
    expect(page.locator("#loss")).to_have_text("–")
    expect(page.locator("#validation")).to_have_text("")
    expect(page.locator("#no-steps")).to_be_visible()


def test_leaderboard_orders_and_pages(page: Page, server: WebServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    rows = [leader(1, name=HOSTILE), *(leader(rank) for rank in range(2, 51))]
    server.api["/leaderboard"] = {"by": "device", "order": "rac", "total": 120, "rows": rows}
    page.goto(f"{server.url}/leaderboard")
    expect(page.locator("tbody tr")).to_have_count(50)
    expect(page.get_by_role("link", name=HOSTILE)).to_have_attribute("href", "/devices/dev-1")
    expect(page.locator("#shown")).to_have_text("1 to 50 of 120")
    expect(page.get_by_role("link", name="Previous")).to_be_hidden()
    page.get_by_role("link", name="Next").click()
    page.wait_for_url("**/leaderboard?order=rac&page=2")
    expect(page.locator("#shown")).to_have_text("51 to 100 of 120")
    page.get_by_role("link", name="Today").click()
    expect(page.locator("#shown")).to_have_text("1 to 50 of 120")
    expect(page.locator("[aria-current]").last).to_have_text("Today (UTC)")
    boards = [url.split("?")[1] for url in asked if "/api/v1/leaderboard" in url]
    assert boards == [
        "by=device&order=rac&limit=50&offset=0",
        "by=device&order=rac&limit=50&offset=50",
        "by=device&order=day&limit=50&offset=0",
    ]


def test_empty_leaderboard_invites(page: Page, server: WebServer) -> None:
    server.api["/leaderboard"] = {"by": "device", "order": "rac", "total": 0, "rows": []}
    page.goto(f"{server.url}/leaderboard?order=nonsense&page=-3")
    expect(page.get_by_text("Nobody has earned credit yet")).to_be_visible()


def test_device_page(page: Page, server: WebServer) -> None:
    server.api["/devices/dev-1"] = {**DEVICE, "name": HOSTILE}
    page.goto(f"{server.url}/devices/dev-1")
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(page.locator("#state")).to_have_text("Computing")
    expect(page.locator("#claimed")).to_have_text("120 GFLOP/s")
    expect(page.locator("#measured")).to_have_text("31 GFLOP/s")
    expect(page.locator("#kernel")).to_have_text("WebAssembly with relaxed SIMD")
    expect(page.locator("#rtt")).to_have_text("12 ms")
    server.api["/devices/dev-1"] = {**DEVICE, "online": False, "quarantined_until_s": 4e9}
    expect(page.locator("#state")).to_contain_text("Quarantined until")


def test_an_error_of_the_server_is_shown_in_its_words(page: Page, server: WebServer, context: Any) -> None:
    server.api["/devices/dev-1"] = {**DEVICE}
    page.goto(f"{server.url}/devices/dev-1")
    expect(page.locator("#state")).to_have_text("Computing")
    page.route("**/api/v1/devices/dev-1", lambda route: route.fulfill(status=200, body="not JSON"))
    expect(page.get_by_role("alert")).to_contain_text("the answer is not JSON")


def test_admin_logs_in_with_a_form(page: Page, server: WebServer) -> None:
    page.goto(f"{server.url}/admin")
    form = page.locator("form")
    expect(form).to_have_attribute("action", "/admin/login")
    expect(form).to_have_attribute("method", "post")
    expect(page.get_by_label("Admin token")).to_have_attribute("type", "password")
    assert page.locator("script").count() == 0
    page.route("**/admin/login", lambda route: route.fulfill(status=200, body="in"))
    page.get_by_label("Admin token").fill("secret")
    with page.expect_request("**/admin/login") as sent:
        page.get_by_role("button", name="Log in").click()
    # The server refuses a form from elsewhere; under a referrer policy of no-referrer a browser calls its own page so.
    assert sent.value.all_headers()["origin"] == server.url
    assert sent.value.post_data == "token=secret"


def test_admin_launches_a_job_from_the_recipe_and_cancels_it(page: Page, server: WebServer) -> None:
    server.admin = True
    server.recipes = [
        {
            "name": "gpt-bytes",
            "title": "Byte-level GPT",
            "summary": "A small GPT.",
            "steps": 200,
            "schema": GptBytesConfig.model_json_schema(),
        }
    ]
    server.api["/jobs"] = {"jobs": [JOB, {**JOB, "id": "job-0", "state": "succeeded"}], "total": 2}
    server.api["/jobs/job-1/metrics"] = {"job": "job-1", "rows": []}
    server.api["/devices"] = {"devices": [], "total": 0}
    server.api["/jobs/job-1"] = {**JOB, "state": "cancelled"}
    posted: list[tuple[str, Any, str | None]] = []

    def take(route: Any) -> None:
        request = route.request
        if request.method == "GET":
            return route.fallback()
        path = request.url.split("/api/v1")[1]
        posted.append((path, request.post_data_json, request.headers.get("x-csrf-token")))
        return route.fulfill(status=201, json=JOB)

    page.route("**/api/v1/**", take)
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"{server.url}/admin")
    expect(page.get_by_label("Steps", exact=True)).to_have_value("200")
    expect(page.get_by_label("layers")).to_have_value("4")
    cancels = page.get_by_role("button", name="Cancel")
    expect(cancels).to_have_count(1)
    cancels.click()
    page.get_by_label("layers").fill("2")
    page.get_by_label("Steps", exact=True).fill("50")
    page.get_by_label("Name").fill("mine")
    page.get_by_label("Products").select_option("normwise")
    page.get_by_label("Numbers on the way").select_option("bf16")
    page.get_by_role("button", name="Launch").click()
    page.wait_for_url("**/jobs/job-1")
    assert posted == [
        ("/jobs/job-1/cancel", None, "csrf"),
        (
            "/jobs",
            {
                "kind": "train",
                "recipe": "gpt-bytes",
                "config": {"layers": 2},
                "steps": 50,
                "mode": "tiles",
                "accuracy": "normwise",
                "wire": "bf16",
                "name": "mine",
            },
            "csrf",
        ),
    ]


def test_error_page(page: Page, server: WebServer) -> None:
    page.goto(f"{server.url}/nowhere")
    expect(page.get_by_text("There is no page at this address.")).to_be_visible()
