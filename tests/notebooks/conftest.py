"""The kernels that notebooks run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import corpora, stacks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A notebook that a change does not touch runs on one stack; of a few that were asked for, each on both."""
    params = {item: item.callspec.params.get("document") for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")}
    runs = sorted({run for run in params.values() if isinstance(run, str)})
    if config.getoption("--whole") or len(runs) <= corpora.FEW:
        return
    other = corpora.other_stack(runs, corpora.changed_files(config.getoption("--base")))
    if left_out := {item for item, run in params.items() if run in other}:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as here:
        for name, value in stacks.install_kernels(tmp_path_factory.mktemp("jupyter")).items():
            here.setenv(name, value)
        yield
