"""Fixtures that the tests of several data sets share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@pytest.fixture
def as_nobody() -> Callable[[], AbstractContextManager[None]]:
    """Give a context in which this process is nobody, where it is root, who may read everything."""

    @contextmanager
    def be_nobody() -> Iterator[None]:
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            yield
        finally:
            os.seteuid(user)

    return be_nobody
