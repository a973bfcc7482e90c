"""Files are fetched from a real server on this machine: whole and with their digest or not at all, and no wait is without an end."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from trainer.codes import DataError, SettingError
from trainer.data import cifar, idx
from trainer.data.supply import fetch
from trainer.data.supply.fetch import LAYOUTS, Resource, is_there, torchvision_resources

ROOT = Path(__file__).resolve().parents[3]

FETCH = """
import sys
from pathlib import Path
from trainer.data.supply.fetch import Resource, fetch
fetch(sys.argv[1], Path(sys.argv[2]), resources=eval(sys.argv[3]))
"""


class Server(ThreadingHTTPServer):
    """Serve `files` by path; of a path in `cut` only so many bytes arrive, then the connection stays open until `go`, or is closed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.closes = False
        self.drips = False
        self.asked: list[str] = []
        self.go = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path[1:]
        self.server.asked.append(path)
        content = self.server.files.get(path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the other side was killed, or gave up
            self.send(content, self.server.cut.get(path, len(content)))

    def send(self, content: bytes, size: int) -> None:
        self.wfile.write(content[:size])
        if size < len(content) and not self.server.closes:
            for byte in content[size:] if self.server.drips else b"":
                if self.server.go.wait(0.05):
                    return
                self.wfile.write(bytes([byte]))
            self.server.go.wait(60)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.go.set()
        running.shutdown()
        thread.join()


def idx_files(seed: int = 0) -> dict[str, bytes]:
    """Return the four gzipped files of a small MNIST."""
    files = {}
    for count, (images, labels) in zip((7, 3), idx.FILES.values(), strict=True):
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 4, 4), np.uint8)
        files[images + ".gz"] = gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", count, 4, 4) + pixels.tobytes())
        files[labels + ".gz"] = gzip.compress(bytes((0, 0, 8, 1)) + struct.pack(">I", count) + bytes(range(count)))
    return files


def cifar_archive(name: str) -> bytes:
    """Return the archive of a small CIFAR."""
    kind = cifar.KINDS[name]
    values: dict[str, object] = {kind.meta: {kind.names: [str(number) for number in range(kind.classes)]}}
    for file in kind.files[:-1]:
        values[file] = {kind.labels: [1, 2], "data": np.zeros((2, 3072), np.uint8)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file, value in values.items():
            content = pickle.dumps(value, 2)
            info = tarfile.TarInfo(f"{kind.subfolder}/{file}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def offered(server: Server, files: dict[str, bytes], mirrors: tuple[str, ...] = ("",)) -> list[Resource]:
    """Offer the files of a small MNIST on the server; return how to fetch them."""
    server.files |= {f"{mirrors[-1]}{name}": content for name, content in files.items()}
    return [
        Resource(tuple(server.url(mirror + name) for mirror in mirrors), md5(content), f"MNIST/raw/{name}")
        for name, content in files.items()
    ]


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- what goes well


def test_idx_files_come_where_the_reader_looks_and_once(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    resources = offered(server, files)
    assert fetch.fetch("mnist", tmp_path, resources=resources)
    assert left(tmp_path) == sorted(f"MNIST/raw/{name}" for name in files)
    assert len(idx.read_splits(tmp_path, subfolder="MNIST/raw")["train"][1]) == 7
    assert is_there("mnist", tmp_path)
    assert not fetch.fetch("mnist", tmp_path, resources=resources)
    assert server.asked == list(files)


@pytest.mark.parametrize("name", cifar.KINDS)
def test_archives_are_unpacked_where_the_reader_looks(tmp_path: Path, server: Server, name: str) -> None:
    server.files["a/cifar.tar.gz"] = content = cifar_archive(name)
    resources = [Resource((server.url("a/cifar.tar.gz"),), md5(content), "cifar.tar.gz", is_archive=True)]
    assert fetch.fetch(name, tmp_path, resources=resources)
    assert cifar.read_splits(tmp_path, name=name)["test"][1].tolist() == [1, 2]
    assert not fetch.fetch(name, tmp_path, resources=resources)
    names = sorted(f"{cifar.KINDS[name].subfolder}/{file}" for file in cifar.KINDS[name].files)
    assert left(tmp_path) == [".unpacked-cifar.tar.gz.json", *names]


def test_only_what_is_missing_is_fetched(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    names = list(files)
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / names[0].removesuffix(".gz")).write_bytes(gzip.decompress(files[names[0]]))
    (tmp_path / "MNIST" / "raw" / names[2]).write_bytes(files[names[2]])
    assert fetch.fetch("mnist", tmp_path, resources=offered(server, files))
    assert server.asked == [names[1], names[3]]
    idx.read_splits(tmp_path, subfolder="MNIST/raw")


def test_data_that_are_there_need_no_host_and_no_write(tmp_path: Path) -> None:
    for name, content in idx_files().items():
        (tmp_path / name).write_bytes(content)
    before = left(tmp_path)
    assert not fetch.fetch("fashion-mnist", tmp_path, resources=[Resource(("http://127.0.0.1:1/",), "", "x")])
    assert left(tmp_path) == before


def test_next_mirror_is_asked_where_one_fails(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    resources = offered(server, files, mirrors=("none/", "wrong/", "good/"))
    server.files |= {f"wrong/{name}": b"<html>not this</html>" for name in files}
    assert fetch.fetch("mnist", tmp_path, resources=resources)
    assert server.asked[:3] == [mirror + next(iter(files)) for mirror in ("none/", "wrong/", "good/")]
    idx.read_splits(tmp_path, subfolder="MNIST/raw")


# --- what does not


def fails(folder: Path, resources: list[Resource], words: str, stall_seconds: float = 5) -> str:
    """See that it fails in one line that says what to do, and leaves nothing."""
    with pytest.raises(DataError, match=words) as caught:
        fetch.fetch("mnist", folder, resources=resources, stall_seconds=stall_seconds)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("--dataset mnist cannot be fetched: ")
    assert line.endswith(f"put its files into --data-dir {folder} yourself, or use --archive")
    assert not (folder / ".fetching").exists()
    return line


def test_every_host_and_its_reason_are_named(tmp_path: Path, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    file = Resource((f"http://127.0.0.1:{port}/a/x.gz", server.url("x.gz")), md5(b""), "x.gz")
    here = f"127.0.0.1:{server.server_port}"
    line = fails(
        tmp_path, [file], rf"fetched: x.gz \(127.0.0.1:{port}: Connection refused; {here}: HTTP 404 Not Found\);"
    )
    assert "http:" not in line


def test_another_file_is_not_put_into_place(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    resources = offered(server, files)
    server.files[list(files)[2]] = b"another"
    words = f"sent another file: 7 bytes with md5 {md5(b'another')}, expected {resources[2].md5}"
    fails(tmp_path, resources, words)
    assert left(tmp_path) == sorted(f"MNIST/raw/{name}" for name in list(files)[:2])  # whole ones, and good


def test_host_that_closes_half_way_is_said(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    resources = offered(server, files)
    server.cut, server.closes = {next(iter(files)): 100}, True
    fails(tmp_path, resources, r"closed the connection with \d+ bytes to go")
    assert not left(tmp_path)


def test_host_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        fails(tmp_path, [Resource((url,), "", "x")], r"no answer within 0.2 s", stall_seconds=0.4)


def test_host_that_stops_half_way_is_given_up(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    resources = offered(server, files)
    server.cut = {next(iter(files)): 100}
    fails(tmp_path, resources, r"no answer within 0.[24] s", stall_seconds=0.4)


def test_host_that_drips_is_given_up(tmp_path: Path, server: Server) -> None:
    server.files["x"], server.cut, server.drips = bytes(70_100), {"x": 70_000}, True  # for 5 s
    resource = Resource((server.url("x"),), "", "x")
    fails(tmp_path, [resource], r"65536 bytes, then no 64 KiB within 0.6 s", stall_seconds=0.6)


def test_part_of_an_unpacked_archive_is_not_overwritten(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / cifar.KINDS["cifar100"].subfolder
    folder.mkdir()
    (folder / "train").write_bytes(b"mine")
    with pytest.raises(SettingError, match=f"{folder} is already there"):
        fetch.fetch("cifar100", tmp_path, resources=[Resource((server.url("x"),), "", "x", is_archive=True)])
    assert not server.asked
    assert left(tmp_path) == [f"{folder.name}/train"]


# --- killed half way


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_half_way_it_starts_again(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    name = list(files)[1]
    files[name] = gzip.compress(bytes((0, 0, 8, 1)) + struct.pack(">I", 7) + bytes(7)) + bytes(100_000)
    resources = offered(server, files)
    server.cut = {name: 80_000}
    command = [sys.executable, "-c", FETCH, "mnist", str(tmp_path), repr(resources)]
    partial = tmp_path / ".fetching" / name
    with subprocess.Popen(command, cwd=ROOT) as process:
        until(lambda: name in server.asked and partial.exists())
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not is_there("mnist", tmp_path)
    assert left(tmp_path) == [f".fetching/{name}", f"MNIST/raw/{next(iter(files))}"]
    server.cut = {}
    assert fetch.fetch("mnist", tmp_path, resources=resources)
    assert server.asked == [*list(files)[:2], *list(files)[1:]]
    assert {path: (tmp_path / path).read_bytes() for path in left(tmp_path)} == {
        f"MNIST/raw/{file}": files[file] for file in files
    }


# --- torchvision's table


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchvision_knows_what_the_readers_read(name: str) -> None:
    resources = torchvision_resources(name)
    for resource in resources:
        assert len(resource.md5) == 32
        assert all(url.startswith("http") and url.endswith(Path(resource.path).name) for url in resource.urls)
        assert resource.is_archive == (name in cifar.KINDS)
    if name in cifar.KINDS:
        assert len(resources) == 1
    else:
        assert {item.path for item in resources} == {
            f"{LAYOUTS[name].subfolder}/{file}.gz" for file in LAYOUTS[name].files
        }


def test_real_files_have_the_digests_of_the_table(tmp_path: Path, server: Server, test_data: Path) -> None:
    resources = []
    for item in torchvision_resources("mnist"):
        name = Path(item.path).name
        server.files[name] = (test_data / "mnist" / name).read_bytes()
        resources.append(Resource((server.url(name),), item.md5, item.path))
    assert fetch.fetch("mnist", tmp_path, resources=resources)
    assert len(idx.read_splits(tmp_path, subfolder="MNIST/raw")["train"][1]) == 60_000
