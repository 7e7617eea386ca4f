"""Pictures of every page of a real server at work, for whoever looks the pages over: `screenshots.py FOLDER`.

A server, two volunteers in browsers, a liar among the native ones, and a small training job; then each page as a person
meets it: wide and narrow, light and dark. It asserts nothing beyond that the pages come to show what they should.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, expect, sync_playwright

from backend.chromium import FLAGS, find
from backend.recipes import GptBytesConfig
from backend.swarm import Swarm, wait_for

CONFIG = GptBytesConfig(layers=2, width=128, heads=4, context=128, batch=8, sample_tokens=120)
STEPS = 200
WIDE, PHONE = (1280, 900), (390, 844)
DEADLINE_MS = 60_000
Scheme = Literal["light", "dark"]
LOOKS: tuple[tuple[tuple[int, int], Scheme, str], ...] = (
    (WIDE, "light", ""),
    (WIDE, "dark", "-dark"),
    (PHONE, "light", "-phone"),
)


class Camera:
    """Takes pictures of one server's pages."""

    def __init__(self, browser: Browser, url: str, folder: Path) -> None:
        self._browser = browser
        self._url = url
        self._folder = folder

    @contextmanager
    def page(self, path: str, size: tuple[int, int] = WIDE, scheme: Scheme = "light") -> Iterator[Page]:
        """A page in a browser context of its own."""
        width, height = size
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        try:
            page = context.new_page()
            page.set_default_timeout(DEADLINE_MS)
            page.goto(self._url + path)
            yield page
        finally:
            context.close()

    def shoot(self, page: Page, name: str) -> None:
        """The whole length of the page as FOLDER/name.png."""
        page.screenshot(path=self._folder / f"{name}.png", full_page=True)
        print(self._folder / f"{name}.png")

    def all_sizes(self, path: str, name: str, ready: str) -> None:
        """The page wide, wide and dark, and narrow, once `ready` (a selector) is to be seen."""
        for size, scheme, suffix in LOOKS:
            with self.page(path, size, scheme) as page:
                expect(page.locator(ready).first).to_be_visible(timeout=DEADLINE_MS)
                self.shoot(page, name + suffix)


def main(folder: Path) -> None:
    """Take all pictures."""
    executable = find()
    if executable is None:
        sys.exit("no Chromium found (Debian: apt-get install chromium)")
    folder.mkdir(parents=True, exist_ok=True)
    with Swarm() as swarm, sync_playwright() as playwright:
        flags = [flag for flag in FLAGS if not flag.startswith("--headless")]
        browser = playwright.chromium.launch(executable_path=executable, args=[*flags, "--no-sandbox"])
        try:
            take(swarm, Camera(browser, swarm.url, folder))
        finally:
            browser.close()


def take(swarm: Swarm, camera: Camera) -> None:
    """From an empty server to a running job."""
    camera.all_sizes("/leaderboard", "leaderboard-empty", "#empty")
    job = swarm.client.submit_train("gpt-bytes", CONFIG.model_dump(), steps=STEPS, name="Tiny GPT")["id"]
    with camera.page(f"/jobs/{job}") as page:
        expect(page.locator("#why")).to_contain_text("volunteers", timeout=DEADLINE_MS)
        camera.shoot(page, "job-waiting")
    swarm.add_browser("Ada")
    swarm.wait_devices(1)
    camera.all_sizes("/", "volunteer-before", "#jobs li")
    volunteer(camera)
    swarm.add_browser("Emmy")
    swarm.add_native("Mallory", "lie=1")
    wait_for("30 steps", lambda: (swarm.client.job(job)["step"] or 0) >= 30, 120)
    camera.all_sizes(f"/jobs/{job}", "job", "#chart canvas")
    camera.all_sizes("/leaderboard", "leaderboard", "#rows tr")
    devices = {device["name"]: device["id"] for device in swarm.client.devices()}
    wait_for("a quarantine", lambda: any(row["quarantined_until_s"] for row in swarm.client.devices()), 60)
    camera.all_sizes(f"/devices/{devices['Ada']}", "device", "#job[href]")
    camera.all_sizes(f"/devices/{devices['Mallory']}", "device-quarantined", "#dot[data-mood]")
    camera.all_sizes("/no/such/page", "error", "h1")
    camera.all_sizes("/docs", "docs", ".opblock")
    admin(swarm, camera)
    swarm.client.cancel(job)
    with camera.page(f"/jobs/{job}") as page:
        expect(page.locator("#state")).to_have_text("Cancelled", timeout=DEADLINE_MS)
        camera.shoot(page, "job-cancelled")


def volunteer(camera: Camera) -> None:
    """The volunteer's page from the click to Stop."""
    for size, scheme, suffix in LOOKS[::2]:
        with camera.page("/?name=Grace&throwaway=1", size, scheme) as page:
            page.get_by_role("button", name="Start computing").click()
            expect(page.locator("#tiles")).not_to_have_text("0", timeout=DEADLINE_MS)
            expect(page.locator("#job")).to_have_text("Tiny GPT")
            camera.shoot(page, f"volunteer-computing{suffix}")
            page.get_by_role("button", name="Stop").click()
            expect(page.locator("#again")).to_be_visible()
            camera.shoot(page, f"volunteer-stopped{suffix}")


def admin(swarm: Swarm, camera: Camera) -> None:
    """The admin's page: login, a wrong token, and the desk."""
    for size, scheme, suffix in LOOKS:
        with camera.page("/admin", size, scheme) as page:
            camera.shoot(page, f"admin-login{suffix}")
            page.get_by_label("Admin token").fill("wrong")
            page.get_by_role("button", name="Log in").click()
            camera.shoot(page, f"admin-wrong{suffix}")
            page.get_by_label("Admin token").fill(swarm.token)
            page.get_by_role("button", name="Log in").click()
            expect(page.locator("#jobs li").first).to_be_visible()
            camera.shoot(page, f"admin{suffix}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: screenshots.py FOLDER")
    main(Path(sys.argv[1]))
