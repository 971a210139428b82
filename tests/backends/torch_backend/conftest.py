"""Scores of layers that no earlier run of the tests has measured."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _scores_are_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("induction")
        patch.setattr("backends.torch_backend.backend.INDUCTION_CACHE", folder)
        yield
