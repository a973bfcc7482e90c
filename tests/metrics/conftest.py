"""What the tests of the metrics share: a node's folder in memory, and reading what its endpoint says."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trainer.metrics import Exporter, new_folder, serve
from trainer.metrics.folder import IN_MEMORY

Values = dict[str, float]


@pytest.fixture
def folder() -> Iterator[Path]:
    with new_folder([IN_MEMORY]) as path:
        assert path is not None
        yield path


@pytest.fixture
def exporter(folder) -> Iterator[Exporter]:
    with serving(folder) as exporter:
        yield exporter


@contextlib.contextmanager
def serving(folder: Path, health: Callable[[], tuple[bool, str]] = lambda: (True, "ok")) -> Iterator[Exporter]:
    exporter = serve(folder, address="127.0.0.1", port=0, health=health)
    assert exporter is not None
    try:
        yield exporter
    finally:
        exporter.close()


@pytest.fixture
def scrape(exporter) -> Callable[[], Values]:
    return lambda: parse(fetch(exporter.port, "/metrics")[1])


def fetch(port: int, path: str, *, method: str = "GET", host: str = "127.0.0.1") -> tuple[str, bytes]:
    """Send one request; return the head of the answer and its body."""
    return exchange(port, f"{method} {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode(), host=host)


def exchange(port: int, request: bytes, *, host: str = "127.0.0.1") -> tuple[str, bytes]:
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.sendall(request)
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return head.decode(), body


def parse(text: bytes) -> Values:
    """Return a scrape's values by series, written as name{label=value,...} in the order of the labels' names."""
    samples = [sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples]
    series = {}
    for sample in samples:
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        series[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return series


@pytest.fixture(scope="session")
def promtool() -> Callable[[bytes], str]:
    """Return what `promtool check metrics` has to say of a scrape."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not there; Debian's package prometheus has it")

    def check(text: bytes) -> str:
        done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
        return (done.stdout + done.stderr).decode() + ("" if done.returncode == 0 else f"code {done.returncode}")

    return check
