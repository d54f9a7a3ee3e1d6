"""Shared by all tests of a session: one pool of ranks, and one server of processes that have torch imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first imported; without a GPU they run interpreted

import pytest

from tests.pool import RankPool, warm_imports
from tests.warm import Warm

# Files that take a minute and more, the longest first: begun last, one would be running long after the other workers are done.
LONG = ("parity", "docs", "training", "mutations", "config", "precision", "cli", "plan", "checkpoint", "bench", "mixtures", "low_experts", "verify",
        "first_hour", "low", "faults", "recompute")  # fmt: skip


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session")
def ranks():
    warm_imports()
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def warm():
    server = Warm()
    server.start()
    yield server
    server.close()
