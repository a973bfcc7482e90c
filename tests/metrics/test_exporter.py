"""The endpoint: what it answers, to whom, and that nothing that connects to it, and no fork, keeps it from answering."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.metrics.conftest import exchange, fetch, parse, serving
from trainer import log
from trainer.beat import Phase, Sign
from trainer.metrics import Recorder, health_of, serve, server
from trainer.metrics.server import MOST_CONNECTIONS, respond


def test_metrics_are_prometheus_text(exporter, folder):
    recorder = Recorder.open(folder, rank=0, local_rank=0)
    recorder.interval(loss=math.nan, learning_rate=math.inf, remaining_seconds=1.0)
    head, body = fetch(exporter.port, "/metrics")
    assert head.splitlines()[0] == "HTTP/1.1 200 OK"
    assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head.splitlines()
    assert f"Content-Length: {len(body)}" in head.splitlines()
    assert b"\ntrainer_loss NaN\n" in body
    assert b"\ntrainer_learning_rate +Inf\n" in body
    assert parse(body)["process_resident_memory_bytes"] > 1e6
    assert not [line for line in body.splitlines() if b"_created" in line or b"pid=" in line]
    assert b"trainer_device_memory" not in body, "what has no series has no help"


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/other"])
def test_head_is_the_answer_without_its_body(exporter, path):
    head, body = fetch(exporter.port, path)
    head_only, nothing = fetch(exporter.port, path, method="HEAD")
    length = {"Content-Length"} if path == "/metrics" else set()  # the process's own numbers change
    same = [
        [line for line in text.splitlines() if line.split(":")[0] not in {"Date", *length}]
        for text in (head, head_only)
    ]
    assert same[0] == same[1]
    assert (bool(body), nothing) == (True, b"")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/readyz", 200),
        ("GET", "/metrics?name[]=trainer_loss", 200),
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/favicon.ico", 404),
        ("POST", "/elsewhere", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
        ("OPTIONS", "/readyz", 405),
        ("get", "/readyz", 400),
        ("GET", "no\x01path", 400),
    ],
)
def test_only_get_and_head_of_three_paths_are_answered(exporter, method, path, status):
    head, _ = fetch(exporter.port, path, method=method)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert ("Allow: GET, HEAD" in head.splitlines()) == (status == 405)


@pytest.mark.parametrize("request_", [b"\x16\x03\x01\r\n\r\n", b"x" * 20_000, b"GET /readyz\r\n\r\n", b"\r\n\r\n"])
def test_what_is_no_request_is_refused(exporter, request_):
    with contextlib.suppress(ConnectionResetError):
        assert exchange(exporter.port, request_)[0].startswith("HTTP/1.1 400 ")
    assert fetch(exporter.port, "/readyz")[1] == b"ready\n"


def test_body_of_a_request_is_thrown_away_and_the_answer_arrives(exporter):
    head, _ = exchange(exporter.port, b"POST /metrics HTTP/1.1\r\nContent-Length: 20000000\r\n\r\n" + b"x" * 20_000_000)
    assert head.startswith("HTTP/1.1 405 ")


def test_request_may_come_byte_by_byte(exporter):
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /readyz HTTP/1.1\n\n":
            connection.send(bytes([byte]))
            time.sleep(0.001)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_page_that_fails_is_an_answer_too():
    assert respond(b"GET / HTTP/1.1\r\n\r\n", pages={"/": lambda: 1 / 0}).startswith(b"HTTP/1.1 500 ")


def test_health_is_asked_each_time(folder):
    healths = iter([(True, "ok"), (False, "rank 1: no sign of life for 40 s in training"), (True, "ok")])
    with serving(folder, lambda: next(healths)) as exporter:
        answers = [fetch(exporter.port, "/healthz") for _ in range(3)]
        assert [head.split()[1] for head, _ in answers] == ["200", "503", "200"]
        assert answers[1][1] == b"rank 1: no sign of life for 40 s in training\n"
        assert fetch(exporter.port, "/healthz")[0].split()[1] == "500"
        assert fetch(exporter.port, "/readyz")[0].split()[1] == "200"


def test_rank_that_is_silent_for_half_its_time_is_named():
    signs = [
        (4, Sign(9, -1, Phase.STEP, since=100.0, due=160.0, text="")),
        (5, Sign(9, -1, Phase.SAVING, 100.0, 700.0, "")),
    ]
    assert health_of(signs, now=129.0) == (True, "ok")
    assert health_of(signs, now=140.0) == (False, "rank 4: no sign of life for 40 s in training")
    assert health_of([], now=140.0) == (True, "ok")


def test_file_that_cannot_be_read_is_one_warning_and_an_error(exporter, folder, caplog, monkeypatch):
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    Recorder.open(folder, rank=0, local_rank=0)
    (folder / "counter_rank1.db").write_bytes(b"\xff\xff\x00\x00" + b"nonsense" * 3)
    assert [fetch(exporter.port, "/metrics")[0].split()[1] for _ in range(2)] == ["500", "500"]
    assert len({line for line in caplog.messages if "cannot be read" in line}) == 1
    (folder / "counter_rank1.db").unlink()
    assert fetch(exporter.port, "/metrics")[0].split()[1] == "200"


@pytest.mark.parametrize("address", ["", "127.0.0.1", "localhost"])
def test_busy_port_is_a_warning(exporter, folder, address, caplog, monkeypatch):
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    assert serve(folder, address=address, port=exporter.port, health=lambda: (True, "")) is None
    (line,) = set(caplog.messages)
    assert f"no metrics: cannot listen on port {exporter.port}" in line
    assert "in use" in line
    assert "--metrics-port" in line


@pytest.mark.parametrize("address", ["203.0.113.1", "no.such.host.invalid", "x" * 80])
def test_address_that_is_not_ours_is_a_warning(folder, address, caplog, monkeypatch):
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    assert serve(folder, address=address, port=0, health=lambda: (True, "")) is None
    assert len(set(caplog.messages)) == 1


@pytest.mark.parametrize(
    ("address", "hosts"), [("", ["127.0.0.1", "::1"]), ("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"])]
)
def test_address_may_be_of_either_kind(folder, address, hosts):
    if "::1" in hosts and not socket.has_dualstack_ipv6():
        hosts = hosts[:-1]
    with contextlib.closing(serve(folder, address=address, port=0, health=lambda: (True, ""))) as exporter:
        assert [fetch(exporter.port, "/readyz", host=host)[1] for host in hosts] == [b"ready\n"] * len(hosts)


def test_close_frees_the_port_and_ends_the_thread(folder):
    before = threading.active_count()
    with serving(folder) as exporter:
        silent = socket.create_connection(("127.0.0.1", exporter.port))
        assert fetch(exporter.port, "/readyz")[1] == b"ready\n"
    assert threading.active_count() == before
    assert silent.recv(10) == b""
    silent.close()
    again = serve(folder, address="127.0.0.1", port=exporter.port, health=lambda: (True, ""))
    assert again is not None
    again.close()


def test_linger_ends_when_it_is_told(exporter):
    calls = iter([False, False, True])
    exporter.linger(600.0, stop=lambda: next(calls))
    assert list(calls) == []
    exporter.linger(0.0, stop=lambda: pytest.fail("there was nothing to wait for"))


#: An exporter in a process of its own, as the agent is: its main thread waits for SIGTERM with all others blocked, and ends by it.
SERVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from trainer.metrics import Recorder, serve
folder = Path(sys.argv[1])
recorder = Recorder.open(folder, rank=0, local_rank=0)
exporter = serve(folder, address="", port=0, health=lambda: (True, "ok"))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
{extra}
print(exporter.port, flush=True)
time.sleep(0.3)  # a signal that comes now has to wait for the main thread
while signal.sigwait([signal.SIGTERM, signal.SIGCHLD]) != signal.SIGTERM:
    pass
os._exit(42)
"""


@contextlib.contextmanager
def server_process(folder: Path, extra: str = ""):
    code = SERVER.replace("{extra}", extra)
    command = [sys.executable, "-c", code, folder]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def status_of(pid: int) -> dict[str, int]:
    """Return Threads and VmRSS (in kB) of a process."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(rows[name].split()[0]) for name in ("Threads", "VmRSS")}


def test_stop_signals_stay_with_the_main_thread(folder):
    with server_process(folder) as (process, port):
        for _ in range(20):
            assert fetch(port, "/readyz")[1] == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 42


@pytest.mark.parametrize(
    "extra",
    [
        "child = subprocess.Popen(['sleep', '30'])",
        "child = subprocess.Popen(['sleep', '30'], preexec_fn=lambda: None)",
        "child = os.fork()\nif not child: import time; time.sleep(30)",
    ],
    ids=["exec", "exec after a function", "fork"],
)
def test_children_do_not_keep_the_port(folder, extra):
    with server_process(folder, f"{extra}\nprint(getattr(child, 'pid', child), file=sys.stderr)") as (process, port):
        assert fetch(port, "/readyz")[1] == b"ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
    try:
        with contextlib.closing(serve(folder, address="", port=port, health=lambda: (True, ""))) as exporter:
            assert exporter.port == port
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)


def flood(port: int, count: int) -> None:
    """Ask for paths that are not there, one connection each."""
    for number in range(count):
        with contextlib.suppress(OSError):
            assert fetch(port, f"/wp-admin/{number}")[0].split()[1] == "404"


@contextlib.contextmanager
def crowd(port: int):
    """Hold 300 idle connections, 30 that send a byte now and then, and 30 that ask for the metrics and do not read them."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket()) for _ in range(360)]
        for connection in connections[-30:]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        for connection in connections:
            connection.settimeout(5)
            connection.connect(("127.0.0.1", port))
        for connection in connections[300:]:
            with contextlib.suppress(OSError):
                connection.send(b"GET /metrics HTTP/1.1\r\n" + (b"\r\n" if connection in connections[-30:] else b"x"))
        yield connections


def test_scrape_is_quick_in_a_crowd(folder):
    with server_process(folder) as (process, port):
        fetch(port, "/metrics")
        before, took = status_of(process.pid), []
        with crowd(port):
            others = [threading.Thread(target=flood, args=(port, 250)) for _ in range(4)]
            for thread in others:
                thread.start()
            while any(thread.is_alive() for thread in others) or len(took) < 20:
                began = time.monotonic()
                assert b"trainer_steps_total" in fetch(port, "/metrics")[1]
                took.append(time.monotonic() - began)
                time.sleep(0.02)
            during = status_of(process.pid)
            descriptors = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        assert max(took) < 1.0
        assert during["Threads"] == before["Threads"] == 2
        assert during["VmRSS"] - before["VmRSS"] < 8 * 1024
        assert descriptors < MOST_CONNECTIONS + 20


def test_who_is_silent_is_let_go(folder, monkeypatch):
    monkeypatch.setattr(server, "EXCHANGE_SECONDS", 0.3)
    with serving(folder) as exporter, socket.create_connection(("127.0.0.1", exporter.port), timeout=10) as silent:
        assert silent.recv(1) == b""


def send_on(connection: socket.socket) -> None:
    for _ in range(200):
        time.sleep(0.05)
        connection.send(b"x")


@pytest.mark.parametrize("request_", [b"GET /metr", b"GET /metrics HTTP/1.1\r\n\r\n"], ids=["slow", "does not go"])
def test_who_takes_too_long_is_let_go(folder, request_, monkeypatch):
    monkeypatch.setattr(server, "EXCHANGE_SECONDS", 0.3)
    with serving(folder) as exporter, socket.create_connection(("127.0.0.1", exporter.port), timeout=10) as connection:
        connection.sendall(request_)
        with pytest.raises(ConnectionError):
            send_on(connection)


def test_server_without_descriptors_goes_on_when_it_has_some(folder):
    extra = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))"
    with server_process(folder, extra) as (_, port):
        idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(30)]
        assert fetch(port, "/readyz")[1] == b"ready\n"
        for connection in idle:
            connection.close()
        assert fetch(port, "/metrics")[0].split()[1] == "200"
