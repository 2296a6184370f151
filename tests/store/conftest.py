"""The fixtures of the tests of the stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.backends import BACKENDS, Cluster


@pytest.fixture(params=sorted(BACKENDS))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Give every backend in turn: ``cluster.open()`` is one more agent's store of one job."""
    place = BACKENDS[request.param](tmp_path)
    yield place
    place.close()
