"""The pages, as a browser gets them: headers, login, CSRF, and nothing that a volunteer named comes out as markup."""

from __future__ import annotations

import re
import time

import pytest

TOKEN = "a-token-for-tests-only"
TRAIN = {"kind": "train", "recipe": "gpt-bytes", "steps": 5}
HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"


def log_in(client) -> str:
    """Logs in; gives the CSRF token that the page holds."""
    answer = client.post("/admin/login", data={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/admin")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie
    return re.search(r'data-csrf="([^"]+)"', client.get("/admin").text).group(1)


def test_every_page_has_the_headers_and_no_inline_code(make_client) -> None:
    client, world = make_client()
    device, _ = world.devices.register(HOSTILE, "agent", time.time())
    job = world.running_job(name=HOSTILE).id
    log_in(client)
    pages = ["/", "/leaderboard", f"/devices/{device}", f"/jobs/{job}", "/admin", "/docs", "/api/v1/jobs", "/nothing"]
    for path in [*pages, "/static/css/site.css", "/docs/init.js"]:
        answer = client.get(path, headers={"Accept": "text/html"})
        assert answer.status_code == (404 if path == "/nothing" else 200), path
        csp = answer.headers["content-security-policy"]
        assert "default-src 'none'" in csp
        assert "unsafe-inline" not in csp
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-embedder-policy"] == "require-corp"
        if answer.headers["content-type"].startswith("text/html"):
            assert "<img src=x" not in answer.text, path
            assert "{{" not in answer.text.replace("{{7*7}}", ""), path
            assert not re.search(r"<script(?![^>]*\bsrc=)", answer.text), path
            assert not re.search(r"<style|\sstyle=|\son\w+=\"", answer.text), path
            links = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
            assert links
            assert not [link for link in links if "//" in link], path  # nothing from elsewhere


def test_what_the_pages_load_is_served(make_client) -> None:
    client, _ = make_client()
    for path in ("/", "/leaderboard", "/admin"):
        for asset in re.findall(r'(?:src|href)="(/static/[^"]+)"', client.get(path).text):
            answer = client.get(asset)
            assert answer.status_code == 200, asset
            assert answer.headers["cache-control"] == "no-cache"
            again = client.get(asset, headers={"If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304
    script = client.get("/static/js/protocol.js")
    assert script.headers["content-type"].startswith("text/javascript")
    for path in ("/static/../templates/base.html", "/static/%2e%2e/templates/base.html", "/static/..%2ftsconfig.json"):
        assert client.get(path).status_code == 404, path


def test_a_session_needs_its_csrf_token_to_change_something(make_client) -> None:
    client, _ = make_client()
    assert "Log in" in client.get("/admin").text
    csrf = log_in(client)
    assert client.post("/api/v1/jobs", json=TRAIN).status_code == 403
    assert client.post("/api/v1/jobs", json=TRAIN, headers={"X-CSRF-Token": csrf[:-1]}).status_code == 403
    assert client.post("/api/v1/jobs", json=TRAIN, headers={"X-CSRF-Token": csrf}).status_code == 201
    assert client.post("/admin/logout", data={"csrf": "x"}).status_code == 403
    assert client.post("/admin/logout", data={"csrf": csrf}).status_code == 303
    assert client.post("/api/v1/jobs", json=TRAIN, headers={"X-CSRF-Token": csrf}).status_code == 401


def test_a_session_ends_with_its_time_and_with_the_token(make_client) -> None:
    client, _ = make_client(session_s_max=60)
    log_in(client)
    now = time.time()
    client.app.state.auth._clock = lambda: now + 61
    assert "Log in" in client.get("/admin").text


def test_logins_from_elsewhere_and_wrong_tokens(make_client) -> None:
    client, _ = make_client(login_failures_per_minute_max=2)
    form = {"token": TOKEN}
    assert client.post("/admin/login", data=form, headers={"Origin": "https://evil.example"}).status_code == 403
    for _ in range(2):
        answer = client.post("/admin/login", data={"token": "wrong"})
        assert answer.status_code == 401
        assert "not the token" in answer.text
        assert "set-cookie" not in answer.headers
    assert client.post("/admin/login", data=form).status_code == 429


@pytest.mark.parametrize("path", ["/jobs/none", "/devices/none", "/nothing", "/jobs/..%2f"])
def test_errors_are_pages_for_people_and_json_for_programs(make_client, path) -> None:
    client, _ = make_client()
    seen = client.get(path, headers={"Accept": "text/html"})
    assert seen.status_code == 404
    assert "<h1>Error 404</h1>" in seen.text
    assert client.get(path).json()["detail"]


def test_no_cross_origin_reader_and_no_open_redirect(make_client) -> None:
    client, _ = make_client()
    answer = client.get("/api/v1/jobs", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert client.options("/api/v1/jobs", headers={"Origin": "https://evil.example"}).status_code == 405
    answer = client.post("/admin/login?next=https://evil.example", data={"token": TOKEN})
    assert answer.headers["location"] == "/admin"
    assert client.get("//evil.example/..").status_code in (200, 404)
