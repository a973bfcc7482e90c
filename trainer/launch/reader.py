"""Read one value at a time from options and variables; what a launcher means by them is in recognisers.py."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.codes import SettingError
from trainer.launch.places import Options


def is_service_link(value: str) -> bool:
    """Tell whether Kubernetes set this value for a Service: one called `master` sets MASTER_PORT=tcp://10.0.0.1:80."""
    return "://" in value


class Reader:
    """Give values by name, options (`--nnodes`) and variables (`PET_NNODES`) alike; an empty text is unset.

    Attributes:
        found: the names that a value was taken from, in order.
        warnings: one line for each value that was passed over.
    """

    def __init__(self, environ: Mapping[str, str], options: Options) -> None:
        flags = {
            "--nnodes": options.nnodes,
            "--node-rank": options.node_rank,
            "--nproc-per-node": options.nproc_per_node,
            "--master-addr": options.master_addr,
            "--master-port": options.master_port,
            "--local-rank": options.local_rank,
        }
        self._values = {**environ, **{name: str(value) for name, value in flags.items() if value is not None}}
        self.found: list[str] = []
        self.warnings: list[str] = []

    def has(self, *names: str) -> bool:
        """Tell whether all of these are set."""
        return not self.missing(*names)

    def missing(self, *names: str) -> list[str]:
        """Return those of these names that are unset."""
        return [name for name in names if not self._values.get(name, "").strip()]

    def first(self, *names: str) -> str | None:
        """Return the first of these names that is set; names are given in order of precedence."""
        return next((name for name in names if self.has(name)), None)

    def use(self, *names: str) -> None:
        """Remember that these told something."""
        self.found.extend(name for name in names if name not in self.found)

    def text(self, *names: str) -> str | None:
        """Return the first value that is set, without blanks around it, or None."""
        name = self.first(*names)
        if name is None:
            return None
        self.use(name)
        return self._values[name].strip()

    def address(self, *names: str) -> str | None:
        """Return the first host that is set; an IPv6 address loses its brackets, which torch does not take."""
        text = self.text(*names)
        return text.removeprefix("[").removesuffix("]") if text is not None else None

    def number(self, *names: str, minimum: int = 0) -> int | None:
        """Return the first number that is set, or None.

        Raises:
            SettingError: the first value that is set is not a whole number >= minimum.
        """
        name = self.first(*names)
        return None if name is None else self._whole(name, minimum=minimum)

    def demand(self, *names: str, minimum: int = 0) -> int:
        """Return the first number that is set, where the caller knows that one is."""
        value = self.number(*names, minimum=minimum)
        assert value is not None, names
        return value

    def _whole(self, name: str, *, minimum: int, maximum: int | None = None) -> int:
        text = self.text(name) or ""
        value = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
        if value < minimum or (maximum is not None and value > maximum):
            upto = "" if maximum is None else f" and <= {maximum}"
            raise SettingError(f"{name} is {text!r}; allowed: a whole number >= {minimum}{upto}")
        return value

    def port(self, *names: str) -> int | None:
        """Return the first port that is set, or None; what a Kubernetes Service link set is passed over and warned about.

        Raises:
            SettingError: the value is no port.
        """
        for name in names:
            value = self._values.get(name, "").strip()
            if is_service_link(value):
                self.warnings.append(f"{name} is {value!r}, which Kubernetes sets for a Service: passed over")
            elif value:
                return self._whole(name, minimum=1, maximum=65535)
        return None

    def processes(self, *names: str) -> int | None:
        """Return the first number of processes per node that is set; None means one per visible device.

        Raises:
            SettingError: the value is neither a number >= 1 nor auto or gpu.
        """
        name = self.first(*names)
        if name is None:
            return None
        text = self.text(name) or ""
        if text.lower() in ("auto", "gpu"):
            return None
        if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
            raise SettingError(f"{name} is {text!r}; allowed: a whole number >= 1, auto or gpu")
        return int(text)
