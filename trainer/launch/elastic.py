"""Read a node of an elastic job: how many nodes there may be, where they meet, and what PET_* say of that, as torchrun reads them."""

from __future__ import annotations

import re

from trainer.codes import SettingError
from trainer.launch.places import Elastic, Node
from trainer.launch.reader import Reader

#: torchrun's, where PET_RDZV_ENDPOINT names none.
_RENDEZVOUS_PORT = 29400
#: Keys of PET_RDZV_CONF whose values are no numbers.
_WORDS = ("is_host", "store_type")


def read_elastic(
    reader: Reader, launcher: str, *, nodes_name: str, processes: tuple[str, ...], default_port: int
) -> Node:
    """Read a node of minimum:maximum nodes, a text that is in `nodes_name`; a port that --master-port leaves out is `default_port`.

    Raises:
        SettingError: a value is not allowed, or none says where the nodes meet.
    """
    if reader.has("--node-rank"):
        raise SettingError("--node-rank is given, but elastic nodes are numbered when they meet; drop the option")
    minimum, maximum = _limits(reader, nodes_name)
    host, port = _endpoint(reader, nodes_name, default_port)
    backend = reader.text("PET_RDZV_BACKEND") or "c10d"
    if backend != "c10d":
        raise SettingError(f"PET_RDZV_BACKEND is {backend!r}; allowed: c10d")
    elastic = Elastic(
        minimum,
        maximum,
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        run_id=reader.text("PET_RDZV_ID"),
        conf=_conf(reader),
        max_restarts=reader.number("PET_MAX_RESTARTS"),
        local_addr=reader.address("PET_LOCAL_ADDR"),
    )
    return Node(0, minimum, reader.processes(*processes), host, port, launcher, elastic=elastic)


def _limits(reader: Reader, name: str) -> tuple[int, int]:
    text = reader.text(name) or ""
    found = re.fullmatch("([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise SettingError(f"{name} is {text!r}; allowed: a whole number >= 1, or minimum:maximum")
    return low, high


def _endpoint(reader: Reader, nodes_name: str, default_port: int) -> tuple[str, int]:
    given = reader.address("--master-addr")
    if given is not None:
        return given, reader.port("--master-port") or default_port
    text = reader.text("PET_RDZV_ENDPOINT")
    if text is None:
        raise SettingError(
            f"{nodes_name} is {reader.text(nodes_name)!r}, an elastic job, but PET_RDZV_ENDPOINT is not set; "
            "set it to host:port, or give --master-addr"
        )
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+)(?::([0-9]{1,5}))?", text)
    port = int(found[2] or _RENDEZVOUS_PORT) if found else 0
    if not found or not 1 <= port <= 65535:
        raise SettingError(f"PET_RDZV_ENDPOINT is {text!r}; allowed: host:port, an IPv6 address in brackets")
    return found[1].strip("[]"), port


def _conf(reader: Reader) -> tuple[tuple[str, str], ...]:
    text = reader.text("PET_RDZV_CONF") or ""
    pairs = [tuple(part.strip() for part in pair.partition("=")[::2]) for pair in text.split(",") if pair.strip()]
    if not all(key and (key in _WORDS or re.fullmatch("[1-9][0-9]*", value)) for key, value in pairs):
        raise SettingError(
            f"PET_RDZV_CONF is {text!r}; allowed: key=value,key=value, with seconds as whole numbers >= 1, as in last_call_timeout=5"
        )
    return tuple((key, value) for key, value in pairs)
