"""The kernels that notebooks run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import stacks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as here:
        for name, value in stacks.install_kernels(tmp_path_factory.mktemp("jupyter")).items():
            here.setenv(name, value)
        yield
