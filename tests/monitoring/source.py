"""An endpoint that has what the catalogue declares, of a run on two nodes of CPUs; counters count seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from trainer.metrics.table import SERIES, Series

#: What a CPU does not have.
GPU_ALONE = ("trainer_device_memory_allocated_bytes", "trainer_device_memory_reserved_bytes")
#: Of labels whose values exclude each other, the one that holds.
CHOSEN = {"trainer_phase": "train", "trainer_bottleneck": "compute"}
GAUGES = {"trainer_learning_rate": 0.1, "trainer_checkpoint_interval_seconds": 600.0}
STILL = ("trainer_restarts_total", "trainer_nonfinite_losses_total", "trainer_checkpoint_saves_total", "trainer_rank_exits_total")  # fmt: skip
#: Of each second; what is not here is 0.
SHARES = {"compute": 0.8, "comm_wait": 0.15, "data_wait": 0.05, "productive": 1.0}


@contextlib.contextmanager
def nodes(count: int = 2) -> Iterator[list[str]]:
    """Serve the endpoints of a run, rank 0's first; give where they are (host:port)."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_node(number)) for number in range(count)]


@contextlib.contextmanager
def _node(number: int) -> Iterator[str]:
    began = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page(number, seconds=time.monotonic() - began).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def page(node: int, *, seconds: float) -> str:
    """Return what a node's /metrics says: two ranks a node."""
    lines = [f"process_start_time_seconds {time.time() - seconds:.0f}", "process_resident_memory_bytes 3e7"]
    for series in SERIES:
        if series.name not in GPU_ALONE and (node == 0 or series.scope != "J"):
            lines += _samples(series, node=node, seconds=seconds)
    return "\n".join(lines) + "\n"


def _samples(series: Series, *, node: int, seconds: float) -> list[str]:
    ranks = [2 * node, 2 * node + 1] if series.scope == "R" else [None]
    found = []
    for rank in ranks:
        labels = {"rank": str(rank)} if rank is not None else {}
        labels |= {fact: "" if fact == "uuid" else "x" for fact in series.facts}
        for value in series.values or ("",):
            own = labels | ({series.label: value} if series.label else {})
            found += _lines(series, own, value, seconds=seconds)
    return found


def _lines(series: Series, labels: dict[str, str], value: str, *, seconds: float) -> list[str]:
    if series.kind != "histogram":
        return [f"{series.name}{_braces(labels)} {_number(series, value, seconds=seconds)}"]
    bounds = [*(str(float(bound)) for bound in series.buckets), "+Inf"]
    counts = [f"{series.name}_bucket{_braces(labels | {'le': bound})} {seconds}" for bound in bounds]
    return [*counts, f"{series.name}_sum{_braces(labels)} {seconds}", f"{series.name}_count{_braces(labels)} {seconds}"]


def _number(series: Series, value: str, *, seconds: float) -> float:
    if series.name in CHOSEN:
        return float(value == CHOSEN[series.name])
    if series.kind == "counter":
        return 0.0 if series.name in STILL else seconds * (SHARES.get(value, 0.0) if value else 1.0)
    return time.time() if "timestamp" in series.name else GAUGES.get(series.name, 1.0)


def _braces(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
