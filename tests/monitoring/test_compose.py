"""docker/compose.yaml and what Grafana is given: names, ports and folders agree, and the health check does what it says."""

from __future__ import annotations

import contextlib
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import yaml

from tests.monitoring.conftest import DOCKER
from tests.monitoring.expressions import DASHBOARD

COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
GRAFANA = DOCKER / "grafana" / "provisioning"


def mounts(service: str) -> dict[str, str]:
    """Return a service's volumes: what is where in the container."""
    return {place: what for what, place, *_ in (volume.split(":") for volume in SERVICES[service]["volumes"])}


def test_volumes_are_there():
    for service in SERVICES:
        for what in mounts(service).values():
            assert (DOCKER / what).is_dir() if what.startswith(".") else what in COMPOSE["volumes"], what


def test_images_have_tags_and_ports_are_of_this_host_alone():
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["image"].rpartition(":")[2][-1].isdigit()
        assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


def test_prometheus_scrapes_the_trainer():
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert (job["job_name"], job["static_configs"]) == ("trainer", [{"targets": ["trainer:9464"]}])
    assert config["global"]["scrape_interval"] == "15s"
    assert "trainer" in SERVICES
    assert mounts("prometheus")["/etc/prometheus"] == "./prometheus"


def test_grafana_opens_the_dashboard_over_prometheus():
    (source,) = yaml.safe_load((GRAFANA / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "dashboards" / "trainer.yaml").read_text())["providers"]
    folder, variables = provider["options"]["path"], SERVICES["grafana"]["environment"]
    assert source["url"] == "http://prometheus:9090"
    assert (DOCKER / mounts("grafana")[folder]).resolve() == DASHBOARD.parent
    assert variables["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/{DASHBOARD.name}"
    assert (variables["GF_AUTH_ANONYMOUS_ENABLED"], variables["GF_AUTH_ANONYMOUS_ORG_ROLE"]) == ("true", "Viewer")


@contextlib.contextmanager
def endpoint(status: int) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(("status", "is_well"), [(200, True), (503, False), (404, False)])
def test_health_check_asks_the_endpoint(status, is_well):
    with endpoint(status) as port:
        assert (_health(port) == 0) is is_well


def test_health_check_fails_where_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert _health(port) != 0


def _health(port: int) -> int:
    """Run the health check's line, at another port, and return its code."""
    cmd, python, *args, code = SERVICES["trainer"]["healthcheck"]["test"]
    assert (cmd, python, args) == ("CMD", "python", ["-I", "-S", "-c"])
    assert "9464" in code
    line = code.replace("9464", str(port))
    return subprocess.run([sys.executable, *args, line], capture_output=True, timeout=60, check=False).returncode
