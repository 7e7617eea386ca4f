"""The volunteer's page in a real browser: products checked with NumPy, memory, consent, and why it waits."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tileweave.protocol.messages import Bye, Drop, Limits, Need, Revoke, Status

pytestmark = pytest.mark.browser
MIB = 1 << 20
WEB = Path(__file__).resolve().parents[2] / "web"
Device = Any
WebServer = Any


def start(page: Page, server: WebServer, threads: int = 1) -> Device:
    """Open the page, click, and return the connected device."""
    page.goto(server.url)
    page.get_by_role("slider").fill(str(threads))
    page.get_by_role("button", name="Start computing").click()
    return server.device()


def matrix(rows: int, k: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, k), dtype=np.float32)


def check(got: np.ndarray, a: np.ndarray, bt: np.ndarray) -> None:
    """Rows and columns by sample where the product is large."""
    product = got.reshape(len(a), len(bt))
    rows = np.unique(np.linspace(0, len(a) - 1, 64).astype(int))
    exact = a[rows].astype(np.float64) @ bt.T.astype(np.float64)
    size = np.abs(a[rows]).astype(np.float64) @ np.abs(bt.T).astype(np.float64)
    assert (np.abs(product[rows] - exact) <= (a.shape[1] + 2) * 2.0**-24 * size).all()


def test_nothing_runs_before_the_click(page: Page, server: WebServer) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    expect(page.get_by_text("No job is running at the moment")).to_be_visible()
    assert page.workers == []
    assert server.hellos == 0
    assert not any(url.endswith(".wasm") or "worker" in url for url in asked)
    page.goto(f"{server.url}/?threads=1&name=Ada")
    expect(page.get_by_label("Your name")).to_have_value("Ada")
    assert page.workers == [], "the choice is filled in, and still nothing runs"
    page.get_by_role("button", name="Start computing").click()
    assert server.device().hello.name == "Ada"


def test_profile_and_status(page: Page, server: WebServer) -> None:
    device = start(page, server)
    profile = device.hello.profile
    assert profile.kernel in ("wasm-relaxed", "wasm-strict"), "a software GPU, scalar code and Python are slower"
    assert profile.flops > 1e8
    assert 32 * MIB < profile.memory_bytes <= 512 * MIB
    assert profile.workers == 1
    status = server.run(device.message(Status))
    assert (status.state, status.visible, status.capacity_bytes) == ("ready", True, profile.memory_bytes)
    expect(page.locator("#state")).to_have_text("Waiting for work")


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 3, 5), (31, 33, 257), (512, 1018, 4071), (513, 1030, 4100), (4096, 4096, 16), (4096, 8, 4096)],
    ids=["4 B", "60 B", "odd", "15.9 MiB panel", "16.1 MiB panel", "64 MiB result", "64 MiB panel"],
)
def test_products(page: Page, server: WebServer, m: int, n: int, k: int) -> None:
    device = start(page, server)
    a, bt = matrix(m, k, 1), matrix(n, k, 2)

    async def tile() -> np.ndarray:
        await device.panel("a", a)
        await device.panel("b", bt)
        await device.lease(1, m, n, k, "a", "b")
        message, product = await device.result()
        assert message.lease == 1
        assert message.job == "job-1"
        assert message.seconds > 0 or m * n * k < 1e6
        await device.ack(1, 2 * m * n * k)
        return product

    check(server.run(tile()), a, bt)
    expect(page.locator("#tiles")).to_have_text("1")


def test_batches_and_two_workers_share_panels(page: Page, server: WebServer) -> None:
    device = start(page, server, threads=2)
    assert device.hello.profile.workers == 2
    batch, m, n, k = 3, 17, 40, 65
    a, bt = matrix(batch * m, k, 3), matrix(batch * n, k, 4)

    async def run() -> list[tuple[int, np.ndarray]]:
        await device.panel("a", a)
        await device.panel("b", bt)
        for lease in range(1, 7):
            await device.lease(lease, m, n, k, "a", "b", batch=batch)
        return [(message.lease, product) for message, product in [await device.result() for _ in range(6)]]

    results = server.run(run())
    assert sorted(lease for lease, _ in results) == [1, 2, 3, 4, 5, 6]
    for _, product in results:
        for i, each in enumerate(product.reshape(batch, m * n)):
            check(each, a[i * m : (i + 1) * m], bt[i * n : (i + 1) * n])


def renderer_bytes() -> int:
    """Resident bytes of all renderer processes below this one."""
    parents, memory, renderers = {}, {}, set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            if b"--type=renderer" in (entry / "cmdline").read_bytes():
                renderers.add(int(entry.name))
        except OSError:
            continue  # it ended while we looked
        parents[int(entry.name)] = int(re.search(r"PPid:\s+(\d+)", status)[1])  # type: ignore[index]
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        memory[int(entry.name)] = int(found[1]) * 1024 if found else 0

    def ours(pid: int) -> bool:
        while pid in parents:
            if pid == os.getpid():
                return True
            pid = parents[pid]
        return False

    return sum(memory[pid] for pid in renderers if ours(pid))


def test_two_thousand_tiles_leave_memory_flat(page: Page, server: WebServer) -> None:
    device = start(page, server)
    m, n, k = 256, 128, 32

    async def tiles(first: int, count: int) -> None:
        """Each with an A of its own, as in training: 160 KiB of panels and results a tile."""
        for lease in range(first, first + count):
            a = matrix(m, k, lease)
            await device.panel(f"a.{lease}", a)
            await device.lease(lease, m, n, k, f"a.{lease}", "b")
            if lease > first + 2:
                message, product = await device.result()
                await device.ack(message.lease, 2 * m * n * k)
                await device.send(Drop(panels=[f"a.{message.lease}"]))
                if message.lease % 100 == 0:
                    check(product, matrix(m, k, message.lease), bt)
        for _ in range(min(3, count)):
            message, _ = await device.result()
            await device.ack(message.lease, 2 * m * n * k)
            await device.send(Drop(panels=[f"a.{message.lease}"]))

    bt = matrix(n, k, 0)
    server.run(device.panel("b", bt))
    server.run(tiles(1, 500))
    expect(page.locator("#tiles")).to_have_text("500")
    heap, resident = page.locator("#heap").inner_text(), renderer_bytes()
    assert resident > 0
    server.run(tiles(501, 1500))
    expect(page.locator("#tiles")).to_have_text("2,000")
    assert page.locator("#heap").inner_text() == heap, "the WASM memory grew"
    assert renderer_bytes() < resident + 64 * MIB, "1,500 tiles moved 240 MiB"


def test_a_full_device_makes_room_by_itself(page: Page, server: WebServer) -> None:
    page.add_init_script("Object.defineProperty(Navigator.prototype, 'deviceMemory', { get: () => 0.25 });")
    device = start(page, server)
    capacity = device.hello.profile.memory_bytes
    assert capacity < 32 * MIB
    m, n = 500, 100
    shapes = [256 + 64 * (i % 7) for i in range(4 * capacity // (4 * m * 448))]  # panels of several sizes, no DROP

    async def run() -> list[int]:
        done = []
        for lease, k in enumerate(shapes):
            await device.panel(f"a.{lease}", matrix(m, k, lease))
            await device.panel(f"b.{lease}", matrix(n, k, lease + 1))
            await device.lease(lease, m, n, k, f"a.{lease}", f"b.{lease}")
            if lease:
                message, product = await device.result()
                number = message.lease
                check(product, matrix(m, shapes[number], number), matrix(n, shapes[number], number + 1))
                await device.ack(number)
                done.append(number)
        return done

    assert server.run(run()) == list(range(len(shapes) - 1))
    heap = float(page.locator("#heap").inner_text().removesuffix(" MiB"))
    assert capacity / MIB / 2 < heap <= 32


def test_a_ping_is_answered_while_the_kernel_runs(page: Page, server: WebServer) -> None:
    server.limits = Limits(
        frame_bytes_max=MIB,
        panel_bytes_max=64 * MIB,
        result_bytes_max=64 * MIB,
        leases_max=8,
        ping_s=0.05,
        silence_s_max=8,
    )
    device = start(page, server)
    n = 2048
    a, bt = matrix(n, n, 5), matrix(n, n, 6)

    async def run() -> tuple[float, int]:
        await device.panel("a", a)
        await device.panel("b", bt)
        before = device.pongs
        await device.lease(1, n, n, n, "a", "b")
        message, _ = await device.result()
        return message.seconds, device.pongs - before

    seconds, pongs = server.run(run())
    assert pongs > seconds / 0.05 / 4, f"{pongs} PONGs during {seconds} s"


def test_a_panel_not_held_is_asked_for_and_a_revoked_lease_is_silent(page: Page, server: WebServer) -> None:
    device = start(page, server)
    a = matrix(8, 8, 1)

    async def run() -> int:
        await device.panel("a", a)
        await device.lease(1, 8, 8, 8, "a", "b")
        need = await device.message(Need)
        assert (need.panel, need.lease) == ("b", 1)
        await device.lease(2, 8, 8, 8, "a", "b")
        await device.send(Revoke(job="job-1", leases=[1]))
        await device.panel("b", a)
        message, product = await device.result()
        check(product, a, a)
        return message.lease

    assert server.run(run()) == 2


def test_stop_and_start_again_as_the_same_device(page: Page, server: WebServer) -> None:
    first = start(page, server)
    assert (first.hello.device, first.hello.secret) == (None, None)
    page.get_by_role("button", name="Stop").click()
    assert server.run(first.message(Bye)).code == "done"
    expect(page.locator("#state")).to_have_text("Stopped")
    expect(page.locator("#why")).to_have_text("You stopped it: nothing runs on this device now.")
    expect(page.locator("#gflops")).to_have_text("0")
    expect(page.locator("#no-job")).to_be_visible()
    page.get_by_role("button", name="Start again").click()
    again = server.device()
    assert (again.hello.device, again.hello.secret) == ("dev-1", "a-secret-of-a-device")
    page.reload()
    expect(page.get_by_role("button", name="Start computing")).to_be_visible()
    assert page.workers == [], "a reload waits for the click"
    page.get_by_role("button", name="Start computing").click()
    assert server.device().hello.device == "dev-1"


def test_stop_works_while_the_kernel_is_still_measured(page: Page, server: WebServer) -> None:
    server.overrides["/static/js/compute_worker.js"] = b"// never answers"
    page.goto(server.url)
    page.get_by_role("button", name="Start computing").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#state")).to_have_text("Stopped")
    page.get_by_role("button", name="Start again").click()
    expect(page.locator("#state")).to_have_text("Starting")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#state")).to_have_text("Stopped")


def test_a_lost_connection_is_taken_up_and_the_result_sent_again(page: Page, server: WebServer) -> None:
    device = start(page, server)
    a = matrix(8, 8, 1)

    async def lose() -> None:
        await device.panel("a", a)
        await device.lease(1, 8, 8, 8, "a", "a")
        await device.result()
        device.socket.transport.abort()

    server.run(lose())
    again = server.device()
    assert again.hello.leases == [1]
    assert again.hello.panels == ["a"]
    message, product = server.run(again.result())
    assert message.lease == 1
    check(product, a, a)


def test_a_silent_server_is_left(page: Page, server: WebServer) -> None:
    server.pings = False
    server.limits = Limits(
        frame_bytes_max=MIB, panel_bytes_max=MIB, result_bytes_max=MIB, leases_max=8, ping_s=1, silence_s_max=1.5
    )
    first = start(page, server)
    second = server.device()
    assert second.hello.device == "dev-1"
    server.run(asyncio.wait_for(first.closed.wait(), 30))


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("reload", "This page is older than the server"),
        ("replaced", "This device is connected elsewhere"),
        ("quarantined", "Quarantined"),
        ("busy", "The server is busy"),
    ],
)
def test_the_page_says_why_it_stopped_or_waits(page: Page, server: WebServer, code: Any, state: str) -> None:
    device = start(page, server)
    server.run(device.send(Bye(code=code, reason="because <b>I</b> say so", retry_s=60)))
    expect(page.locator("#state")).to_have_text(state)
    expect(page.locator("#why")).to_contain_text("because <b>I</b> say so")
    assert page.locator("#why b").count() == 0
    expect(page.get_by_role("button", name="Reload the page")).to_be_visible(visible=code == "reload")


RELAXED_MADD, RELAXED_NMADD = b"\xfd\x85\x02", b"\xfd\x86\x02"
ADD, SUBTRACT = b"\xfd\xe4\x01", b"\xfd\xe5\x01"


def broken(build: str, good: bytes, bad: bytes) -> bytes:
    """A build of the kernel whose products are wrong: one instruction stands for another."""
    wasm = (WEB / "static" / "wasm" / f"gemm_{build}.wasm").read_bytes()
    assert wasm.count(good) > 4
    return wasm.replace(good, bad)


def test_a_wrong_kernel_is_dropped_and_the_page_says_why(page: Page, server: WebServer) -> None:
    server.overrides["/static/wasm/gemm_relaxed.wasm"] = broken("relaxed", RELAXED_MADD, RELAXED_NMADD)
    device = start(page, server)
    assert device.hello.profile.kernel == "wasm-strict"
    page.get_by_text("what else was tried").click()
    expect(page.get_by_text("WebAssembly with relaxed SIMD: not used: wrong product")).to_be_visible()


def test_without_any_right_kernel_the_device_does_not_join(page: Page, server: WebServer) -> None:
    server.overrides["/static/wasm/gemm_relaxed.wasm"] = broken("relaxed", RELAXED_MADD, RELAXED_NMADD)
    wrong = broken("strict", ADD, SUBTRACT)
    server.overrides["/static/wasm/gemm_strict.wasm"] = server.overrides["/static/wasm/gemm_scalar.wasm"] = wrong
    server.overrides["/static/vendor/pyodide/pyodide.mjs"] = b"throw new Error('no Pyodide')"
    page.goto(server.url)
    page.get_by_role("button", name="Start computing").click()
    expect(page.locator("#state")).to_have_text("This device cannot help")
    expect(page.locator("#why")).to_contain_text("wrong product")
    expect(page.locator("#why")).to_contain_text("pyodide:")
    expect(page.locator("#kernel")).to_have_text("none")
    assert server.hellos == 0


@pytest.mark.parametrize("kernel", ["wasm-relaxed", "wasm-strict", "wasm-scalar", "pyodide", "python"])
def test_the_address_can_force_a_kernel(page: Page, server: WebServer, kernel: str) -> None:
    page.goto(f"{server.url}/?kernel={kernel}&threads=2")
    page.get_by_role("button", name="Start computing").click()
    device = server.device()
    assert device.hello.profile.kernel == kernel
    assert device.hello.profile.workers == 2
    a, bt = matrix(300, 70, 1), matrix(200, 70, 2)

    async def tile() -> np.ndarray:
        await device.panel("a", a)
        await device.panel("b", bt)
        await device.lease(1, 300, 200, 70, "a", "b")
        return (await device.result())[1]

    check(server.run(tile()), a, bt)


def test_an_unknown_kernel_is_refused_in_words(page: Page, server: WebServer) -> None:
    page.goto(f"{server.url}/?kernel=abacus")
    page.get_by_role("button", name="Start computing").click()
    expect(page.locator("#why")).to_contain_text("no such kernel")


def test_a_second_tab_does_not_compute(page: Page, server: WebServer) -> None:
    start(page, server)
    other = page.context.new_page()
    other.goto(server.url)
    other.get_by_role("button", name="Start computing").click()
    expect(other.locator("#state")).to_have_text("Already running in another tab")
    assert server.hellos == 1


def test_autostart_for_demos_on_this_machine(page: Page, server: WebServer) -> None:
    page.goto(f"{server.url}/?autostart=1&threads=1&name=demo-1&throwaway=1")
    device = server.device()
    assert device.hello.name == "demo-1"
    assert page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("claims", ["0", "-1", "1e9", "'8'", "NaN", "undefined", "'many'"])
def test_absurd_claims_of_the_browser_are_survived(page: Page, server: WebServer, claims: str) -> None:
    page.add_init_script(
        f"for (const name of ['deviceMemory', 'hardwareConcurrency'])"
        f" Object.defineProperty(Navigator.prototype, name, {{ get: () => {claims} }});"
    )
    device = start(page, server)
    assert 16 * MIB < device.hello.profile.memory_bytes <= 512 * MIB
    assert device.hello.profile.workers == 1
