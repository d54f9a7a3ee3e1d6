"""Shards of texts as a job array of SLURM, and a job that merges them: one script for both, and its submission."""

from __future__ import annotations

import shlex
from pathlib import Path

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.version import VERSION
from phalanx.config.cluster import ClusterConfig, seconds_of
from phalanx.launch.job import FINAL
from phalanx.launch.programs import ask
from phalanx.launch.shards import ShardedTexts
from phalanx.launch.slurm import slurm_time
from phalanx.launch.template import template


def write(texts: ShardedTexts, cluster: ClusterConfig, typed: str, script: Path) -> str:
    """The batch script, to be read and kept. Of the section `cluster` it reads what a job of CPUs has. ConfigError for
    what it has no place for."""
    if cluster.image is not None:
        rule = "is not read by `data prepare --on slurm`: its tasks run outside containers"
        raise ConfigError([Problem("cluster.image", cluster.image, rule, {}, (None,))])
    seconds = None if cluster.time is None else seconds_of(cluster.time)
    given = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "mem": cluster.memory,
        "time": None if seconds is None else slurm_time(seconds),
    }
    return template("prepare.sbatch").render(
        header=[typed, f"Written by phalanx {VERSION}. Read it, change it, keep it."],
        texts=texts,
        cluster=cluster,
        name=Path(texts.prefix).name,
        options=[f"--{name}={shlex.quote(str(value))}" for name, value in given.items() if value is not None],
        script=shlex.quote(str(script)),
        workdir=Path.cwd(),
        words=words_of(texts),
        final=FINAL,
    )


def words_of(texts: ShardedTexts) -> list[str]:
    """The words after `phalanx` for each shard, less which one it is."""
    words = ["data", "prepare", *texts.inputs, "--tokenizer", texts.tokenizer, "--json-keys", ",".join(texts.keys)]
    words += ["--errors", texts.errors, "--workers", str(texts.workers)]
    words += [] if texts.append_eod else ["--no-append-eod"]
    if texts.split:
        words += ["--split", ",".join(f"{name}={share!r}" for name, share in texts.split.items())]
    return [*words, *(["--overwrite"] if texts.overwrite else [])]


def submit(texts: ShardedTexts, script: Path) -> tuple[str, str]:
    """Submit both jobs: the numbers of the array and of the merge, which begins when no shard runs or waits any more.
    It submits those again that lost their nodes."""
    folder = Path(f"{texts.prefix}.shards")
    folder.mkdir(parents=True, exist_ok=True)  # for the logs
    for code in folder.glob("*.code"):  # of an earlier submission
        code.unlink()
    shards = number_of(ask("sbatch", "--parsable", f"--array=0-{texts.count - 1}", str(script)))
    after = (f"--dependency=afterany:{shards}", f"--export=ALL,SHARDS_JOB={shards}")
    return shards, number_of(ask("sbatch", "--parsable", *after, str(script)))


def number_of(printed: str) -> str:
    """Of `4711` or `4711;cluster`."""
    return printed.partition(";")[0]
