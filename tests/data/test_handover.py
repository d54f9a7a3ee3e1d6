"""Results of worker processes whose large arrays come through files without a name."""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phalanx.data.handover import (
    LARGE,
    QUEUED,
    HandoverFile,
    HandoverPool,
    InFile,
    memory_file,
    unlinked_file,
    without_large,
)
from phalanx.data.media import ChatMedia, Task, read_units, reader_of
from phalanx.sequence.sample import Units


def noise(number: int, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 1 << 15, shape).astype(dtype)


def arrays(number: int) -> list[np.ndarray]:
    """Of all kinds, and others for each number."""
    rows = 4000 + number
    return [
        noise(number, rows, 30),
        noise(number, rows, 8, dtype=np.int64),
        noise(number, 3, 4),
        np.empty((0, 1176), np.float32),
        noise(number, rows, 60)[:, ::2],
        noise(number, rows, 30, dtype=np.float64).T,
        noise(number, rows, 40, dtype=np.float16),
        noise(number, rows, 40).astype(">i4"),
        np.array(number, np.uint8),
    ]


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and found.tobytes() == expected.tobytes()
        and found.flags.writeable
    )


def test_arrays_arrive_bit_for_bit_and_in_order():
    pool = HandoverPool(2)
    numbers = range(3 * len(pool.files) + 1)
    for number, found in zip(numbers, pool.map(arrays, numbers), strict=True):
        assert all(map(same, found, arrays(number)))
    assert sizes_of(pool) == {0}


def sizes_of(pool: HandoverPool) -> set[int]:
    return {os.fstat(file.descriptor).st_size for file in pool.files}


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_images_of_workers_are_those_of_this_process(kind, tmp_path):
    from tests.harness.parity import MODELS  # here, because it imports torch, and workers import this file

    spec = MODELS[kind].media
    tasks = []
    for number, (height, width) in enumerate([(40, 30), (900, 700), (7, 50), (640, 320), (9, 9), (512, 512)] * 2):
        file = io.BytesIO()
        Image.fromarray(noise(number, height, width, 3, dtype=np.uint8)).save(file, "PNG")
        (tmp_path / f"{number}.png").write_bytes(file.getvalue())
        reader = reader_of(spec, None)
        rows, tokens = reader.sizes(file.getvalue(), "a.png")
        own = number % 5 != 4
        tasks.append(Task(str(tmp_path), f"{number}.png", rows, tokens, f"line {number}", reader, own))
    expected = [read_units(task) for task in tasks]
    if kind == "qwen2_5_vl":
        assert max(units.values.nbytes for units in expected) > LARGE > min(units.values.nbytes for units in expected)
    media = ChatMedia(spec, reader_of(spec, None), workers=2)
    for found, units in zip(media._read(tasks), expected, strict=True):
        assert same(found.values, units.values) and same(found.coordinates, units.coordinates)
        assert same(found.features, units.features)
        assert (found.sizes, found.joined, found.names) == (units.sizes, units.joined, units.names)


def test_large_arrays_do_not_go_through_the_pipe():
    values, coordinates = noise(0, 3000, 1176), noise(0, 3000, 5, dtype=np.int64)
    units = Units(values, coordinates, (3000,), np.arange(0, 3000, 4), 4, ("a.png",))
    rest, buffers = without_large(units)
    assert [raw.tobytes() for raw in buffers] == [values.tobytes(), coordinates.tobytes()]
    assert len(pickle.dumps(rest)) < LARGE


# ---- files that cannot grow


def limited(case: tuple[int, int]) -> np.ndarray:
    """An array, in a worker whose files may have so many bytes."""
    limit, number = case
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return noise(number, 1 << 18)


def test_a_file_without_room_is_not_needed():
    """Without room for anything, or for the beginning alone; and the next result has room again."""
    pool = HandoverPool(1)
    cases = [(limit, number) for number, limit in enumerate([0, 1 << 19, resource.RLIM_INFINITY] * QUEUED)]
    for (_, number), found in zip(cases, pool.map(limited, cases), strict=True):
        assert same(found, noise(number, 1 << 18))
    assert sizes_of(pool) == {0}


LIMITED = """
import resource
import numpy as np
from phalanx.data.handover import HandoverFile, InFile, {made}

file = HandoverFile({made}())
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
try:
    file.fill([memoryview(bytes(4000)), memoryview(bytes(4000))])
except OSError:
    print("full", end="")
file.fill([memoryview(b"abc")])
print(file.take(InFile((3,), np.dtype("u1"))).tobytes())
"""


@pytest.mark.parametrize("made", [memory_file, unlinked_file], ids=lambda made: made.__name__)
def test_a_file_has_no_name_and_says_when_it_is_full(made):
    file = HandoverFile(made())
    assert os.fstat(file.descriptor).st_nlink == 0 and not os.get_inheritable(file.descriptor)
    file.fill([memoryview(b"abc"), memoryview(b"de")])
    first, then = file.take([InFile((3, 1), np.dtype("u1")), InFile((1,), np.dtype("<i2"))])
    assert (first.tobytes(), first.shape, then.tobytes(), then.shape) == (b"abc", (3, 1), b"de", (1,))
    with pytest.raises(EOFError, match="an array of 7 bytes was cut short"):
        file.take(InFile((7,), np.dtype("u1")))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(made=made.__name__)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "fullb'abc'\n"


# ---- ends


def refused(number: int) -> np.ndarray:
    if number == 1:
        raise ValueError("number 1")
    return noise(number, 1 << 18)


def test_nothing_is_left_of_results_that_an_error_left_behind():
    pool = HandoverPool(2)
    with pytest.raises(ValueError, match="number 1"):
        pool.map(refused, range(100))
    assert sizes_of(pool) == {0}
    numbers = range(2, 30)
    assert all(map(same, pool.map(refused, numbers), map(refused, numbers)))


def test_threads_take_turns():
    pool = HandoverPool(2)
    wanted = [range(first, first + 20) for first in (2, 100, 200)]
    with ThreadPoolExecutor(3) as threads:
        for numbers, found in zip(wanted, threads.map(lambda each: pool.map(refused, each), wanted), strict=True):
            assert all(map(same, found, map(refused, numbers)))


def first_then_wait(number: int) -> np.ndarray:
    if number == 1:
        print("waits", flush=True)
        threading.Event().wait()
    return noise(number, 1 << 18)


def hangs() -> None:
    HandoverPool(2).map(first_then_wait, range(2))


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    """Their end is the end of what they print."""
    program = "from tests.data.test_handover import hangs; hangs()"
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    with parent:
        assert parent.stdout is not None and parent.stdout.readline() == "waits\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == ""
    assert list(tmp_path.iterdir()) == []
