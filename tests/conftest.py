"""Shared by all tests of a session: one pool of ranks, one server of processes that have torch imported, the order
of files, `--table`."""

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is first imported; without a GPU they run interpreted

import pytest

from tests.harness.interpreter import make_ready_once
from tests.harness.pool import RankPool, warm_imports
from tests.harness.soak import table
from tests.harness.warm import Warm

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each test file in `make test`, as `--record-durations` wrote them. The longest begin first: begun last,
one would be running long after the other workers are done."""

# Of `make soak`: faults wait for seconds and take up to a minute each, pairs of features take less than one.
SOAK = ("faults", "mutations", "llama_cpp", "training", "deterministic", "precision", "parity", "support")


# The same examples on every machine and at any speed; `--hypothesis-profile default` draws others.
with contextlib.suppress(ImportError):  # GPU machines may lack it
    from hypothesis import HealthCheck, settings

    settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("same")


def pytest_addoption(parser):
    parser.addoption("--table", help="write what was run, file by file, into this file of Markdown")
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {DURATIONS.name}, by which files are ordered"
    )


def pytest_collection_modifyitems(config, items):
    if config.option.markexpr == "soak":
        order = {f"test_{name}": number for number, name in enumerate(SOAK)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    else:
        seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
        items.sort(key=lambda item: -seconds.get(item.path.stem, 0))


def pytest_collection_finish(session):
    if os.environ.get("TRITON_INTERPRET") == "1" and not session.config.option.collectonly:
        make_ready_once()


def pytest_terminal_summary(terminalreporter, config):
    if config.option.record_durations:
        seconds = Counter()
        for report in (r for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "duration")):
            seconds[Path(report.nodeid.partition("::")[0]).stem] += report.duration
        longest = {name: round(s) for name, s in seconds.most_common() if s >= 5}
        DURATIONS.write_text(json.dumps(longest, indent=1) + "\n", encoding="utf-8")
    if config.option.table:
        text = table(terminalreporter.stats, config.option.numprocesses or 1)
        Path(config.option.table).write_text(text, encoding="utf-8")
        terminalreporter.write(text)


@pytest.fixture(autouse=True)
def no_family_stays_registered():
    """Families of other packages that a test's configs name are not known to the tests after it."""
    from phalanx.base import registry

    before = set(registry._REGISTERED)
    yield
    for seam, name in set(registry._REGISTERED) - before:
        if seam == "family":
            del registry._REGISTERED[seam, name]


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
