"""Shards of texts as tasks of a running Ray cluster, one on each free CPU. A task whose node or process dies is run
again elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.base.errors import DataError, PhalanxError
from phalanx.base.log import describe
from phalanx.launch.ray_core import check_cpus, connected
from phalanx.launch.shards import ShardedTexts, merge_all, prepare_shard
from phalanx.text.prepare import Summary

RESTARTS = 10  # of a task whose process or node died; more point at the shard itself


def prepare_on_ray(texts: ShardedTexts, progress: Callable[[int], Any]) -> Summary:
    """Prepare all shards and merge them. progress: called with the number of shards that are done. DataError of the
    first shard that found one; what is done is kept, and the same call goes on from there."""
    with connected() as ray:
        check_cpus(ray, texts.workers)
        task = ray.remote(shard_task).options(
            num_cpus=texts.workers, max_retries=RESTARTS, scheduling_strategy="SPREAD", name="phalanx data prepare"
        )
        numbers = {task.remote(texts, number): number for number in range(texts.count)}
        waiting = list(numbers)
        while waiting:
            done, waiting = ray.wait(waiting)
            for one in done:
                refuse(result_of(ray, one, numbers))
            progress(texts.count - len(waiting))
    return merge_all(texts)


def shard_task(texts: ShardedTexts, number: int) -> tuple[str, int]:
    """What a task runs. Errors that a user can cause come back as text and exit code: Ray would try others again."""
    try:
        prepare_shard(texts, number)
    except PhalanxError as error:
        return describe(error), error.exit_code
    return "", 0


def result_of(ray: Any, task: Any, numbers: Mapping[Any, int]) -> tuple[str, int]:
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise PhalanxError(f"shard {numbers[task]}: {last_line(error)}") from None
    except ray.exceptions.RayError as error:
        text = str(error).strip().partition("\n")[0]
        raise PhalanxError(
            f"shard {numbers[task]}: given up after {RESTARTS} restarts ({text}); the same command goes on with what "
            "is left"
        ) from None


def last_line(error: BaseException) -> str:
    """Of a traceback that came from another machine: the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def refuse(result: tuple[str, int]) -> None:
    text, code = result
    if code == DataError.exit_code:
        raise DataError(text.removeprefix("data error: "))
    if code:
        raise PhalanxError(text)
