"""Services that whole test runs share. Each starts when the first test asks for it and ends with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.services.broker import Broker


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of one real broker. Topics, groups and transactional ids are shared: use a namespace of your
    own.
    """
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running.bootstrap
