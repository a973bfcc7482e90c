"""A real Prometheus and promtool, each where it is installed, and what every test here reads."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests.conftest import ROOT

DOCKER = ROOT / "docker"
RULES = DOCKER / "prometheus" / "rules.yml"
READY_SECONDS = 60
#: Another process may take a free port before Prometheus does.
TRIES = 3

CONFIG = """\
global: {{scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: {interval}}}
rule_files: [{rules}]
scrape_configs:
  - job_name: trainer
    static_configs: [{{targets: {targets}}}]
"""


def find(program: str) -> str:
    """Return where a program is; skip the test where it is not."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"not installed: {program}; `make test-monitoring`, as root, installs it")
    return path


@pytest.fixture(scope="session")
def promtool() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Give a function that runs promtool and returns what it said, on whichever stream, as stdout."""
    program = find("promtool")

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run([program, *args], text=True, timeout=120, check=False, **both)

    return run


class Prometheus:
    """A Prometheus with the project's rules, on a port of 127.0.0.1; `close` ends it."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int, log: Path) -> None:
        self.port, self._process, self._log = port, process, log

    @classmethod
    def start(cls, folder: Path, *, targets: Sequence[str], interval: str = "1s", rules: Path = RULES) -> Self:
        """Start one that scrapes these targets (host:port) and keeps its files in the folder; return it when it is ready."""
        config = folder / "prometheus.yml"
        listed = json.dumps(list(targets))
        config.write_text(CONFIG.format(interval=interval, rules=json.dumps(str(rules)), targets=listed))
        for _ in range(TRIES):
            server = cls._launch(folder, config)
            if server._is_ready():
                return server
            server.close()
        raise AssertionError(f"Prometheus does not start:\n{server.log}")

    @classmethod
    def _launch(cls, folder: Path, config: Path) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log, data = folder / "prometheus.log", folder / f"data-{port}"
        command = [find("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={data}", "--log.level=warn"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"],
                cwd=folder, env=os.environ | {"GOMAXPROCS": "1"}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        return cls(process, port=port, log=log)

    @property
    def log(self) -> str:
        """Return what it has logged."""
        return self._log.read_text(errors="replace")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression gives now. Raises AssertionError: Prometheus calls it wrong."""
        answer = self._ask(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        assert answer["status"] == "success", f"{answer.get('error')}: {expression}"
        data = answer["data"]
        assert not answer.get("warnings"), f"{answer['warnings']}: {expression}"
        return data["result"] if data["resultType"] == "vector" else [{"metric": {}, "value": data["result"]}]

    def wait_for(self, expression: str, *, seconds: float = READY_SECONDS) -> list[dict[str, Any]]:
        """Return what an expression gives as soon as it gives anything."""
        deadline = time.monotonic() + seconds
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"no data in {seconds} s: {expression}\n{self.log}"
            time.sleep(0.2)
        return found

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + READY_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                    return True
            except OSError:
                time.sleep(0.1)
        return False

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)
