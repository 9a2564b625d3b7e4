"""The models of the engine's tests, torch's threads, and a control group with little memory where one can be made."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.engine.tiny_models")

from tests.engine.caches import resident_converter  # noqa: E402
from tests.engine.forked import forked_children as forked_children  # noqa: E402
from tests.engine.image_models import squares as squares  # noqa: E402
from tests.engine.processes import children, torch_threads  # noqa: E402
from tests.engine.sessions import own_lock as own_lock  # noqa: E402
from tests.engine.tiny_models import biased_models as biased_models  # noqa: E402
from tests.engine.tiny_models import models_dir as models_dir  # noqa: E402
from tests.engine.tiny_models import normed_models as normed_models  # noqa: E402
from tests.engine.trained_model import language_dir as language_dir  # noqa: E402
from tests.engine.trained_model import trained_model as trained_model  # noqa: E402

LIMIT_BYTES = 128 * 2**20
_MOUNT = Path("/sys/fs/cgroup")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a control group runs where one can be made: as root, outside most containers."""
    needing = [item for item in items if "small_group" in getattr(item, "fixturenames", ())]
    if needing and _make("probe") is None:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
    else:
        _remove("probe")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """The `cgroup.procs` of a group that may use 128 MiB and no swap."""
    group = _make("test")
    assert group is not None
    yield group / "cgroup.procs"
    _remove("test")


def _folder(name: str) -> Path:
    version_2 = (_MOUNT / "cgroup.controllers").is_file()
    return (_MOUNT if version_2 else _MOUNT / "memory") / f"optigpu-{name}-{os.getpid()}"


def _make(name: str) -> Path | None:
    folder = _folder(name)
    try:
        folder.mkdir()
        limit = folder / "memory.max"
        (limit if limit.exists() else folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError:
        _remove(name)
        return None
    with suppress(OSError):  # version 1 has no such file, and a kernel without swap needs none
        (folder / "memory.swap.max").write_text("0")
    return folder


def _remove(name: str) -> None:
    with suppress(OSError):
        _folder(name).rmdir()


@pytest.fixture
def started() -> Callable[[], frozenset[int]]:
    """Which processes this one has started since the test began, and that run."""
    before = children()
    return lambda: children() - before


@pytest.fixture
def converter_at_hand() -> Iterator[None]:
    """What this process converts is written by the resident converter."""
    with resident_converter():
        yield


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For tests of many small operations of torch, whose threads would wait for each other most of the time."""
    with torch_threads(1):
        yield


@pytest.fixture
def several_torch_threads() -> Iterator[None]:
    """For what an operator does with more than one, in a file that has one otherwise."""
    with torch_threads(3):
        yield
