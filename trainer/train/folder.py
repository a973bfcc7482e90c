"""A run's folder: its name, what it records, whether it is finished, and whether it fits the settings given now.

Only rank 0 touches it. Checkpoints inside it are `checkpoint`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer import checkpoint, log
from trainer.codes import CheckpointError, SettingError, Stopped, TrainerError
from trainer.config import Config, Scalar, experiment, settings
from trainer.group import Group

#: Seconds beside --grace that a run which is ending may go on holding its folder.
_MORE_THAN_GRACE = 30.0

CONFIG, SUMMARY, CHECKPOINTS = "config.json", "summary.json", checkpoint.FOLDER


def plain(value: Scalar) -> Scalar:
    """Return a setting's value as JSON holds it."""
    return str(value) if isinstance(value, Path) else value


def settings_record(config: Config, *, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return every setting's value and where it came from, as config.json and the receipt hold them."""
    return {
        name: {"value": plain(getattr(config, name)), "source": sources.get(name, "default")} for name in settings()
    }


@contextlib.contextmanager
def opened(
    config: Config, *, sources: Mapping[str, str], group: Group, stop: Callable[[], int] = lambda: 0
) -> Iterator[Path]:
    """Open this run's folder on rank 0, and hold it, so that no second run writes there; give its path on every rank.

    `stop` returns the stop signal that came, or 0; it ends the wait for another process that holds the folder.

    Raises:
        SettingError: as `open_folder`.
        NoProgress: --max-starts have ended without a new checkpoint.
        PeerLost: another process holds the folder.
        Stopped: `stop` said so.
    """
    with contextlib.ExitStack() as stack:

        def hold(folder: Path) -> None:
            seconds = config.grace + _MORE_THAN_GRACE
            stack.enter_context(checkpoint.hold(folder, wait_seconds=seconds, stop=stop))

        def begin() -> bytes:
            folder = open_folder(config, sources=sources, hold=hold)
            if not is_finished(folder):
                _clean_and_count(folder, most=config.max_starts)
            return os.fsencode(folder)

        folder = Path(os.fsdecode(group.from_rank_0(begin)))
        try:
            yield folder
        except Stopped:
            if group.rank == 0:
                checkpoint.take_back(folder)
            raise


def _clean_and_count(folder: Path, *, most: int) -> None:
    for left in (*checkpoint.sweep(folder), *checkpoint.sweep(folder / CHECKPOINTS)):
        log.info(f"removed {left}, which a run that was killed had left")
    newest = next((checkpoint.step_of(path) for path in checkpoint.find(folder / CHECKPOINTS)), None)
    checkpoint.count_start(folder, step=newest or 0, most=most)


def open_folder(
    config: Config, *, sources: Mapping[str, str], hold: Callable[[Path], None] = lambda folder: None
) -> Path:
    """Make or reopen this run's folder; `hold` is called before anything in it is read or written.

    Raises:
        SettingError: it cannot be written, belongs to another experiment, or has checkpoints that --resume never forbids to use.
    """
    named = config.runs_dir / config.run_name if config.run_name is not None else None
    try:
        folder = named or _make_new(config)
        if not is_finished(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # it is another user's of the group, who has done this
                folder.chmod(folder.stat().st_mode | 0o070)
            hold(folder)
        _check_fits(config, folder)
        if is_finished(folder):
            return folder  # as it is
        checkpoint.replace_json(folder / CONFIG, settings_record(config, sources=sources))
    except TrainerError:
        raise  # a lost peer is an OSError too
    except OSError as error:
        where = named or config.runs_dir
        raise SettingError(
            f"the run folder {where} cannot be written ({error.strerror}, as uid {os.getuid()}); choose another with --runs-dir"
        ) from error
    return folder


def _make_new(config: Config) -> Path:
    """Make a folder with a dated name that nobody else has."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.dataset}-{config.model}".replace(":", "-").replace("/", "-")
    for number in range(1, 1000):
        folder = config.runs_dir / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise SettingError(f"{config.runs_dir} has a thousand runs of this second; choose a --run-name")


def _check_fits(config: Config, folder: Path) -> None:
    if config.resume == "never" and (folder / CHECKPOINTS).exists() and any((folder / CHECKPOINTS).iterdir()):
        raise SettingError(
            f"--resume is never, but {folder} has checkpoints; choose another --run-name, or --resume auto"
        )
    # A checkpoint knows its experiment too, and is compared before it is loaded: a folder that somebody removed and a save made
    # anew has no more than that.
    has_results = (folder / CHECKPOINTS).exists() or (folder / SUMMARY).exists()
    if has_results and (folder / CONFIG).exists():
        check_same(config, _saved_settings(folder / CONFIG), where=str(folder))


def _saved_settings(path: Path) -> dict[str, Any]:
    try:
        return {name: item["value"] for name, item in read_json(path).items()}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not what a run writes there; give another --run-name") from error


def check_same(config: Config, saved: Mapping[str, Any], *, where: str) -> None:
    """Check that every experiment setting equals the saved one.

    Raises:
        SettingError: some differ; the line names each with both values.
    """
    differences = [
        f"{settings()[name].flag} is {_shown(plain(value))}, but {where} was made with {_shown(saved[name])}"
        for name, value in experiment(config).items()
        if name in saved and saved[name] != plain(value)
    ]
    if differences:
        raise SettingError(
            f"{'; '.join(differences)}; give the same, or start a new run (another --run-name, no --resume); --weights RUN takes weights along"
        )


def _shown(value: Scalar) -> str:
    return "(unset)" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def is_finished(folder: Path) -> bool:
    """Tell whether the run has ended well."""
    return (folder / SUMMARY).exists()


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the run's receipt, whose presence means that it is finished. Raises TrainerError where it cannot."""
    try:
        checkpoint.replace_json(folder / SUMMARY, summary)
    except OSError as error:
        raise TrainerError(
            f"{folder / SUMMARY} cannot be written ({error.strerror}); the last checkpoint holds the result"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the run's JSON files. Raises CheckpointError naming it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); it is written when a run starts") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found
