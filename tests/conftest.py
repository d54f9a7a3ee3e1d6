"""Shared by all tests of a session: one pool of ranks, one server of processes that have torch imported, the order
of files, `--table`."""

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterable
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

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
"""Seconds of each test file in `make test`, as `--record-durations` wrote them. The longest begin first: begun last,
one would be running long after the other workers are done. What is not listed takes less than LISTED seconds."""
LISTED = 5

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
        "--record-durations",
        action="store_true",
        help=f"write the seconds of the files that are run into {DURATIONS.name}, by which files are ordered",
    )


def pytest_collection_modifyitems(config, items):
    if config.option.markexpr == "soak":
        order = {f"test_{name}": number for number, name in enumerate(SOAK)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    else:
        seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
        items.sort(key=lambda item: -seconds.get(item.path.relative_to(TESTS).as_posix(), 0))


def pytest_collection_finish(session):
    if os.environ.get("TRITON_INTERPRET") == "1" and not session.config.option.collectonly:
        make_ready_once()


def pytest_terminal_summary(terminalreporter, config):
    if config.option.record_durations:
        reports = [r for found in terminalreporter.stats.values() for r in found if hasattr(r, "duration")]
        known = json.loads(DURATIONS.read_text(encoding="utf-8"))
        DURATIONS.write_text(json.dumps(recorded(known, reports), indent=1) + "\n", encoding="utf-8")
    if config.option.table:
        text = table(terminalreporter.stats, config.option.numprocesses or 1)
        Path(config.option.table).write_text(text, encoding="utf-8")
        terminalreporter.write(text)


def recorded(known: dict[str, int], reports: Iterable[pytest.TestReport]) -> dict[str, int]:
    """Files and their seconds, longest first: those that were run as they took, the others as they are known; files
    that are gone are left out."""
    seconds = Counter[str]()
    for report in reports:
        seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration
    every = Counter({**known, **{name: round(s) for name, s in seconds.items()}})
    return {name: s for name, s in every.most_common() if s >= LISTED and (TESTS / name).is_file()}


@pytest.fixture(autouse=True)
def no_family_stays_registered():
    """Families of other packages that a test's configs name are not known to the tests after it."""
    from phalanx.base import registry

    before = set(registry._REGISTERED)
    yield
    for seam, name in set(registry._REGISTERED) - before:
        if seam == "family":
            del registry._REGISTERED[seam, name]


@pytest.fixture(autouse=True)
def signals_mean_the_same_after_it():
    """A command that ends leaves requests to stop ignored, which a test that ran it here would hand on to whatever
    later tests start."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
