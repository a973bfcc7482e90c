"""Read settings from the environment and from .env files, as texts; nothing is written here.

A value in one pair of quotes loses them, with a warning: `docker run --env-file` and Kubernetes keep quotes that a shell would
have taken off. What Kubernetes sets for its Services (TRAINER_METRICS_PORT=tcp://...) is passed over.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.codes import SettingError
from trainer.config import PREFIX, Setting, parse, settings

#: Variables of our own that are no settings: the agent tells its children who it is, what to do, where the store's socket is,
#: where to give signs of life, where their metrics go; an elastic one, where to leave word of an end.
AGENT_PID, AGENT_JOB = "TRAINER_AGENT_PID", "TRAINER_AGENT_JOB"
STORE_FD, BEAT_FD, END_FILE = "TRAINER_STORE_FD", "TRAINER_BEAT_FD", "TRAINER_END_FILE"
METRICS_DIR = "TRAINER_METRICS_DIR"
_INTERNAL = (AGENT_PID, AGENT_JOB, STORE_FD, BEAT_FD, END_FILE, METRICS_DIR)

_LINK_NAME = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
_LINK_VALUE = re.compile(r"^(tcp|udp|sctp)://")


@dataclass
class Texts:
    """Collect settings as texts.

    Attributes:
        values: text by setting name; empty texts (unset) are left out.
        origins: where each came from, in words.
        dropped: variables that must not be read as settings.
        others: keys of a file that are no settings of ours, such as NCCL_DEBUG.
        warnings: one line each.
    """

    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def _by_variable() -> dict[str, Setting]:
    return {item.variable: item for item in settings().values()}


def nearest(name: str) -> str:
    """Return " (did you mean X?)" for an unknown variable, or nothing where no name is near."""
    # Without the prefix, which would make any two names near.
    near = difflib.get_close_matches(name.removeprefix(PREFIX), [item.upper() for item in settings()], n=1)
    return f" (did you mean {PREFIX}{near[0]}?)" if near else ""


def read_environment(environ: Mapping[str, str]) -> Texts:
    """Read every TRAINER_* variable; unknown ones are warnings here.

    Raises:
        SettingError: a value is not allowed; the line names the variable.
    """
    known, found = _by_variable(), Texts()
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name.startswith("TRAINER_TEST_") or name in _INTERNAL:
            continue
        value = environ[name]
        if _LINK_VALUE.match(value):
            if name in known:
                found.dropped.append(name)
                found.warnings.append(
                    f"{name} is {value!r}, which Kubernetes sets for a Service: passed over, the default is used"
                )
        elif name in known:
            _take(found, known[name], value, f"environment variable {name}")
            found.dropped += [name] if known[name].name not in found.values else []
        elif not _LINK_NAME.search(name):
            found.warnings.append(f"environment variable {name} is no setting of the trainer{nearest(name)}: ignored")
    return found


def _take(found: Texts, item: Setting, value: str, origin: str) -> None:
    text = value.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
        found.warnings.append(
            f"{origin}: the quotes around its value are removed; --env-file of docker and ConfigMaps keep quotes, so leave them out"
        )
    if not text:
        return
    checked = parse(item, text, origin=origin)
    found.values[item.name] = str(checked).lower() if item.kind is bool else text
    found.origins[item.name] = origin


def read_file(path: Path) -> Texts:
    """Read a .env file; texts are taken as they stand, without ${...} expansion, as docker and Kubernetes do.

    Raises:
        SettingError: it is missing or unreadable, has a line that is no KEY=VALUE, an unknown TRAINER_* key, or a wrong value.
    """
    import dotenv.parser

    known, found = _by_variable(), Texts()
    for binding in dotenv.parser.parse_stream(io.StringIO(_read_text(path), newline=None)):
        where = f"{path}, line {_line(binding.original)}"
        if binding.error:
            raise SettingError(
                f"{where}: not KEY=VALUE (is a quote left open?): {binding.original.string.strip().splitlines()[0]!r:.60}"
            )
        if binding.key is None:
            continue
        if binding.value is None:
            raise SettingError(f"{where}: {binding.key} has no value; write {binding.key}=VALUE")
        if not binding.key.startswith(PREFIX):
            found.others[binding.key] = binding.value
        elif binding.key in known:
            _take(found, known[binding.key], binding.value, f"{where}, {binding.key}")
        elif not binding.key.startswith("TRAINER_TEST_"):
            raise SettingError(
                f"{where}: {binding.key} is no setting of the trainer{nearest(binding.key)}; `trainer config` lists them"
            )
    return found


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingError(f"--env-file {path} cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
        bad = content.find(b"\0")
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad >= 0:
        line = content.count(b"\n", 0, bad) + 1
        raise SettingError(f"{path}, line {line}: this is not UTF-8 text; save the file as UTF-8")
    return text


def _line(original: object) -> int:
    # A binding begins with the blank lines before it.
    text, line = str(getattr(original, "string", "")), int(getattr(original, "line", 1))
    return line + text[: len(text) - len(text.lstrip())].count("\n")


def read_files(paths: list[Path]) -> Texts:
    """Read several .env files; a later one wins."""
    merged = Texts()
    for path in paths:
        found = read_file(path)
        merged.values |= found.values
        merged.origins |= found.origins
        merged.others |= found.others
        merged.warnings += found.warnings
    return merged
