"""The pages on the real server: what a person sees from the click to the end, through a crash and a Stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from backend.chromium import find
from backend.recipes import GptBytesConfig
from backend.swarm import Swarm, wait_for

pytestmark = pytest.mark.browser
CONFIG = GptBytesConfig(layers=1, width=64, heads=2, context=64, batch=8, sample_tokens=0).model_dump()
DEADLINE_S = 60.0
expect.set_options(timeout=DEADLINE_S * 1000)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with Swarm() as started:
        yield started


@pytest.fixture
def context() -> Iterator[BrowserContext]:
    """A browser of this test's own; a machine without one fails here, with the way to get it."""
    executable = find()
    assert executable, "no Chromium found (Debian: apt-get install chromium)"
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=executable, args=flags)
        made = browser.new_context()
        made.set_default_timeout(DEADLINE_S * 1000)
        yield made
        browser.close()


@pytest.fixture
def page(context: BrowserContext, swarm: Swarm) -> Iterator[Page]:
    """A page that may talk to the server alone, and complain about nothing but a server that is away."""
    hosts: set[str] = set()
    complaints: list[str] = []
    context.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    made = context.new_page()
    made.on("websocket", lambda socket: hosts.add(urlsplit(socket.url).netloc))
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield made
    assert hosts == {f"127.0.0.1:{swarm.port}"}
    away = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    assert [text for text in complaints if not any(code in text for code in away)] == []


@pytest.fixture
def train(swarm: Swarm) -> Iterator[Any]:
    """Submits training jobs; those that still run at the end are cancelled."""
    made: list[str] = []

    def submit(name: str, steps: int) -> str:
        made.append(swarm.client.submit_train("gpt-bytes", CONFIG, steps=steps, name=name)["id"])
        return made[-1]

    yield submit
    for job in made:
        if swarm.client.job(job)["state"] in ("queued", "running"):
            swarm.client.cancel(job)


def begin(page: Page, swarm: Swarm, name: str) -> dict[str, Any]:
    """Click Start; the device as REST shows it once it is online."""
    if page.url != swarm.url + "/":
        page.goto(swarm.url)
    page.get_by_label("Your name").fill(name)
    page.get_by_role("button", name="Start computing").click()
    expect(page.locator("#device")).to_be_visible()
    return wait_for(f"{name} to be online", lambda: online(swarm, name), DEADLINE_S)


def online(swarm: Swarm, name: str) -> dict[str, Any] | None:
    return next((row for row in swarm.client.devices() if row["name"] == name and row["online"]), None)


def tiles(page: Page) -> int:
    return int(page.locator("#tiles").inner_text().replace(",", ""))


def more_tiles(page: Page) -> None:
    before = tiles(page)
    wait_for("more tiles", lambda: tiles(page) > before, DEADLINE_S)


def test_nothing_runs_before_the_click_and_stop_ends_it_and_the_choice_is_remembered(
    page: Page, swarm: Swarm, train: Any
) -> None:
    train("Sonnets", steps=5000)
    page.goto(swarm.url)
    expect(page.locator("#jobs")).to_contain_text("Sonnets")
    assert page.workers == []
    assert online(swarm, "Grace") is None
    page.get_by_role("slider").fill("1")
    device = begin(page, swarm, "Grace")
    expect(page.locator("#state")).to_have_text("Computing")
    expect(page.locator("#job")).to_have_text("Sonnets")
    more_tiles(page)
    wait_for("a speed", lambda: float(page.locator("#gflops").inner_text()) > 0, DEADLINE_S)
    wait_for("credit", lambda: swarm.client.leaderboard()["rows"], DEADLINE_S)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#state")).to_have_text("Stopped")
    expect(page.locator("#why")).to_contain_text("nothing runs on this device now")
    wait_for("Grace to be offline", lambda: online(swarm, "Grace") is None, DEADLINE_S)
    page.reload()
    expect(page.locator("#jobs")).to_contain_text("Sonnets")
    expect(page.get_by_label("Your name")).to_have_value("Grace")
    expect(page.get_by_role("slider")).to_have_value("1")
    assert page.workers == []
    assert online(swarm, "Grace") is None
    assert begin(page, swarm, "Grace")["id"] == device["id"], "the same browser is the same device"


def test_a_killed_gateway_and_the_next_job_need_no_reload(page: Page, swarm: Swarm, train: Any) -> None:
    first = train("First", steps=5000)
    begin(page, swarm, "Lynn")
    more_tiles(page)
    page.evaluate(
        """() => {
            globalThis.said = [];
            const note = () => said.push(document.getElementById("state").textContent);
            new MutationObserver(note).observe(document.getElementById("state"), { childList: true });
        }"""
    )
    (gateway,) = swarm.pids("backend.gateway")
    os.kill(gateway, signal.SIGKILL)
    wait_for("the page to tell it", lambda: page.evaluate("said.includes('Reconnecting')"), DEADLINE_S)
    wait_for("a new gateway", lambda: swarm.pids("backend.gateway") not in ([], [gateway]), DEADLINE_S)
    again = "said.slice(said.indexOf('Reconnecting')).includes('Computing')"
    wait_for("the page to work again", lambda: page.evaluate(again), DEADLINE_S)
    more_tiles(page)
    wait_for("the server", swarm.client.ready, DEADLINE_S)
    swarm.client.cancel(first)
    expect(page.locator("#state")).to_have_text("Waiting for work")
    train("Second", steps=5000)
    expect(page.locator("#job")).to_have_text("Second")
    more_tiles(page)
    assert page.evaluate("said.length") > 0, "the page is the one that was opened"


def test_the_page_of_a_device_whose_products_are_wrong_says_that_it_is_quarantined(
    page: Page, swarm: Swarm, train: Any
) -> None:
    train("Lies", steps=5000)
    swarm.add_native("Mallory", "lie=1")
    device = wait_for(
        "a rejected result",
        lambda: next((row for row in swarm.client.devices() if row["name"] == "Mallory" and row["rejects"]), None),
        DEADLINE_S,
    )
    page.goto(f"{swarm.url}/devices/{device['id']}")
    expect(page.locator("#state")).to_contain_text("Quarantined until")
    expect(page.locator("#rejects")).to_have_text(str(swarm.client.device(device["id"])["rejects"]))
    expect(page.locator("#accepted")).to_have_text("0")
    expect(page.locator("#credit")).to_have_text("0")


def test_the_loss_curve_grows_by_events_alone_and_the_end_is_shown(page: Page, swarm: Swarm, train: Any) -> None:
    steps = 12
    job = train("Curve", steps=steps)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    page.goto(f"{swarm.url}/jobs/{job}")
    expect(page.locator("#why")).to_contain_text("waiting for volunteers")
    expect(page.locator("#chart")).to_be_hidden()
    swarm.add_native("Native")
    expect(page.locator("#state")).to_have_text("Succeeded")
    expect(page.locator("#step")).to_have_text(str(steps))
    curve = """() => {
        const canvas = document.querySelector("#chart canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const columns = new Set();
        for (let i = 0; i < data.length; i += 4)
            if (data[i] === 26 && data[i + 1] === 101 && data[i + 2] === 112) columns.add((i / 4) % canvas.width);
        return columns.size / canvas.width;
    }"""
    assert page.evaluate(curve) > 0.7, "the curve spans the chart"
    assert asked.count(f"/api/v1/jobs/{job}/metrics") == 1, "the history was read once, when it was empty"
    assert f"/api/v1/jobs/{job}/events" in asked
