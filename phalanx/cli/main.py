"""The `phalanx` program: verbs, options, and errors without tracebacks. Each verb imports what it needs when it is
called."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from phalanx.base.errors import PhalanxError
from phalanx.base.garbage import seldom_collected
from phalanx.base.log import describe, flush_quietly, refusal
from phalanx.base.version import VERSION
from phalanx.cli.completion import configs, keys, use_bash
from phalanx.cli.options import CONFIG, JSON, OVERRIDES, OVERWRITE, PAGES, RANKS, SPECULATE, typed
from phalanx.cli.ranks import prepare_text, run_ranks
from phalanx.cli.torchrun import explain_end
from phalanx.cli.verbs import Verbs
from phalanx.launch.early import listen_early

INVITATION = f"""\
Phalanx {VERSION}: train transformer language models, on one CPU or on thousands of GPUs, with one config.

  phalanx doctor                                  what this machine can do
  phalanx plan CONFIG --ranks 64                  layout, schedule and memory, without a GPU
  phalanx train CONFIG                            train (resumes by itself)
  phalanx train CONFIG layout.tp=2 optim.lr=1e-4  the same with other values
  phalanx generate RUN --prompt "Once upon a time"    text from a checkpoint
  phalanx explain --search warmup                 which config key does that

`phalanx --help` lists every verb."""


FORCE = click.option("--force", is_flag=True, help="Start even if memory cannot hold the run by the forecast.")


@click.group(cls=Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="phalanx")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train transformer language models, on one CPU or on thousands of GPUs, with one config."""
    if ctx.invoked_subcommand is None:
        click.echo(INVITATION)


@cli.command(short_help="Train a run, or continue it.")
@CONFIG
@OVERRIDES
@RANKS
@click.option(
    "--logs", type=click.Path(file_okay=False), default=None, help="Write each rank's output to files in this folder."
)
@FORCE
def train(config: str, overrides: tuple[str, ...], ranks: int | None, logs: str | None, force: bool) -> None:
    """Train the run that CONFIG (.yaml, or .py with `def run()`) describes; continue it if its folder has checkpoints.

    Results go to the config's `dir`. Ctrl-C or SIGTERM saves and exits with 75. Under torchrun or srun it joins
    their ranks. Any key of the config can be set here: layout.tp=2 optim.lr=1e-4 (`phalanx explain KEY` says what it
    means).
    """
    listen_early()
    from phalanx.launch.first_host import watch_first_host

    watch_first_host(os.environ)
    with seldom_collected():
        from phalanx.cli.setup import arguments, check_memory, prepare

        ready = check_memory(prepare(config, overrides, ranks), force)
    prepare_text(ready)
    run_ranks("phalanx.cli.jobs:train", ready, {**arguments(ready.run), "command": typed()}, logs)


@cli.command(short_help="Compare a layout with one process.")
@CONFIG
@OVERRIDES
@RANKS
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Steps to compare.")
def verify(config: str, overrides: tuple[str, ...], ranks: int | None, steps: int) -> None:
    """Compare the run's layout with one process: losses and every gradient, in float64.

    The run is first made small (at most 8 CPU ranks, no data needed). Names the first tensor that differs, and exits
    with 1. At the end it lists the structures of the run that the small copies had, and those that they lacked.
    """
    from phalanx.cli.setup import PreparedRun, arguments, prepare_elsewhere

    ready = prepare_elsewhere(config, overrides, ranks)
    from phalanx.verifying.compare import verify as compare

    def start(run: Any, world: int, steps: int) -> None:
        run_ranks("phalanx.cli.jobs:verify", PreparedRun(run, world), {**arguments(run), "steps": steps}, None)

    compare(ready.run, ready.ranks, start, steps, click.echo)


@cli.command(short_help="Show what each rank will hold and do; needs no GPU.")
@CONFIG
@OVERRIDES
@RANKS
@click.option(
    "--device",
    default=None,
    metavar="NAME",
    help="The GPU it is to fit on, such as H100 (default: says which would do).",
)
@click.option("--serve", "serving", is_flag=True, help="Of generation (`phalanx serve`): CONFIG may be a checkpoint.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=None,
    help="With --serve: tokens of a sequence (default: the model's positions).",
)
@PAGES
@SPECULATE
@click.option(
    "--hosts", type=click.Path(exists=True, dir_okay=False), default=None, metavar="FILE", help="Its hosts, one a line."
)
@click.option(
    "--topology",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    metavar="FILE",
    help="With --hosts: where they are (a cluster file, topology.conf, or the JSON of kubectl get nodes).",
)
@click.option(
    "--write-hosts",
    type=click.Path(dir_okay=False),
    default=None,
    metavar="FILE",
    help="Write the hosts here, in the order that keeps heavy axes near.",
)
def plan(
    config: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    device: str | None,
    serving: bool,
    **more: Any,
) -> None:
    """Print what the run would do on N ranks: stages, schedule, memory, messages, FLOPs. Needs no GPU and no data.

    With --serve: what its model takes when it generates, how many sequences fit, and the tokens per second that memory
    bandwidth allows.

    \b
      phalanx plan run.yaml layout.tp=2 --ranks 64 --device H100
      phalanx plan runs/first --serve --tokens 8192
      phalanx plan run.yaml --ranks 1024 --hosts hosts.txt --topology cluster.yaml
    """
    from phalanx.base.devices import DEVICES, find_device
    from phalanx.cli.hosts import HostFiles

    served = {name: more.pop(name) for name in ("tokens", "pages", "speculate")}
    files = HostFiles(**more)
    wanted = find_device(device) if device else None
    if device and wanted is None:
        raise click.BadParameter(f"{device!r} is none of {', '.join(d.name for d in DEVICES)}", param_hint="--device")
    if serving:
        if files.hosts is not None:
            raise click.UsageError("--hosts is of a run that trains: it goes without --serve")
        from phalanx.cli.plan_serving import AskedServing, plan_serving

        click.echo(plan_serving(config, overrides, ranks, wanted, AskedServing(**served)))
        return
    for name, value in served.items():
        if value is not None:
            raise click.UsageError(f"--{name} is of sequences that are served: it goes with --serve")
    with seldom_collected():
        from phalanx.cli.setup import prepare_elsewhere  # imports torch

        ready = prepare_elsewhere(config, overrides, ranks)
        from phalanx.forecast.text import plan_report

        gc.freeze()  # a large plan sets off collections, which need not go through all that was imported
        report = plan_report(ready.run, ready.ranks, wanted)
    click.echo(report.text)
    if files.hosts is not None:
        click.echo(f"\n{files.text(ready.run, ready.ranks)}")
    if not report.fits:
        raise SystemExit(2)


@cli.command()
def doctor() -> None:
    """Report what this machine can do, and what is missing."""
    from phalanx.cli.doctor import report

    click.echo(report())


@cli.command(short_help="Explain config keys: one, a section, or all.")
@click.argument("key", required=False, shell_complete=keys)
@click.option("--all", "everything", is_flag=True, help="Every key of every section.")
@click.option(
    "--search",
    default=None,
    metavar="WORD",
    help="Keys whose name or meaning has this word, or another framework's name for one.",
)
@click.option("--schema", is_flag=True, help="A JSON schema of config files, for editors.")
def explain(key: str | None, everything: bool, search: str | None, schema: bool) -> None:
    """Explain a config KEY (such as layout.tp), or a section; without one, list the sections."""
    from phalanx.config.explain import all_text, search_text, sections_text
    from phalanx.config.read import explain as explain_key
    from phalanx.config.schema import schema_text

    if sum((key is not None, everything, search is not None, schema)) > 1:
        raise click.UsageError("give one of KEY, --all, --search WORD and --schema")
    if schema:
        click.echo(schema_text())
    elif search is not None:
        click.echo(search_text(search))
    elif everything:
        click.echo(all_text())
    else:
        click.echo(sections_text() if key is None else explain_key(key))
        if key in ("train.plain_ops", "train.kernels"):
            from phalanx.ops.op import rows  # start-up time: it imports torch

            click.echo("\n" + "\n".join(f"  {op}: {title}\n    {made}" for op, title, made, _ in rows()[1:]))


@click.group(cls=Verbs)
def data() -> None:
    """Prepare token files and inspect them."""


cli.add_command(data)
data.add_elsewhere("prepare", "phalanx.cli.data_prepare:data_prepare", "Turn text into token files.")


@data.command("merge", short_help="Join token files.")
@click.argument("out")
@click.argument("shards", nargs=-1, required=True)
@click.option(
    "--copy",
    is_flag=True,
    help="Copy the tokens into one .bin, which Megatron needs, rather than refer to those of SHARDS.",
)
@OVERWRITE
def data_merge(out: str, shards: tuple[str, ...], copy: bool, overwrite: bool) -> None:
    """Join the token files SHARDS, in the order given, into OUT."""
    from phalanx.cli.show import files_text
    from phalanx.text.prepare import merge_shards

    summary = merge_shards(out, shards, copy=copy, overwrite=overwrite)
    click.echo(files_text(summary.documents, summary.tokens, out))


@data.command("pack", short_help="Pack documents into sequences, once.")
@CONFIG
@OVERRIDES
def data_pack(config: str, overrides: tuple[str, ...]) -> None:
    """Pack the documents of CONFIG's token files into sequences, longest first, and store that beside them for
    data.packing=offline."""
    from phalanx.cli.show import pack_text

    for line in pack_text(config, overrides):
        click.echo(line)


data.add_elsewhere("score", "phalanx.cli.score:data_score", "Write a teacher's log-probabilities.")


@data.command("train-tokenizer", short_help="Train a tokenizer on text.")
@click.argument("inputs", nargs=-1, required=True)
@click.option("-o", "--out", required=True, help="Folder for tokenizer.json and tokenizer_config.json.")
@click.option(
    "--vocab-size", type=click.IntRange(min=257), required=True, help="Tokens, the end of a document included."
)
@click.option(
    "--kind",
    type=click.Choice(["bpe", "wordpiece", "unigram"]),
    default="bpe",
    show_default=True,
    help="bpe and unigram work on bytes.",
)
@click.option(
    "--json-keys",
    "--key",
    default="text",
    show_default=True,
    help="Fields of a line (a.b: inside a), or columns; a,b: both.",
)
def data_train_tokenizer(inputs: tuple[str, ...], out: str, vocab_size: int, kind: str, json_keys: str) -> None:
    """Train a tokenizer on text files, .jsonl or .parquet files (.gz, .zst), folders or globs of them."""
    from collections import Counter

    from phalanx.text.readers import ReadOptions, cut, find_files, texts
    from phalanx.text.tokenizers import TRAINERS

    reading = ReadOptions(keys=tuple(json_keys.split(",")))
    parts = (part for piece in cut(list(find_files(inputs)), 1 << 23, lambda before: True) for part in piece)
    made = TRAINERS[kind]((text for part in parts for text in texts(part, reading, Counter())), vocab_size, out)
    click.echo(f"tokenizer={out} kind={kind} vocab_size={made.vocab_size} eod={made.eod}")


@data.command("show", short_help="Show token files, or what a run trains on.")
@click.argument("what", metavar="PREFIX|CONFIG")
@OVERRIDES
@click.option("--tokenizer", default=None, help="Show text rather than token numbers (default: the config's).")
@click.option(
    "--documents", type=click.IntRange(min=0), default=2, show_default=True, help="Documents of PREFIX to show."
)
@click.option("--start", type=click.IntRange(min=0), default=0, show_default=True, help="The first of them.")
@click.option(
    "--step",
    type=int,
    default=None,
    metavar="K",
    help="Which tokens make step K of CONFIG (default: a table of its sources).",
)
@click.option("--rank", type=int, default=None, metavar="R", help="Only what this rank reads in step K.")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="The first N chats (or documents) that CONFIG trains on, with what of them is trained, read and cut off.",
)
@RANKS
def data_show(
    what: str,
    overrides: tuple[str, ...],
    tokenizer: str | None,
    documents: int,
    start: int,
    step: int | None,
    rank: int | None,
    samples: int | None,
    ranks: int | None,
) -> None:
    """Show what is in the token files PREFIX.bin and PREFIX.idx, or what a run of CONFIG (or a run's folder) trains
    on."""
    from phalanx.cli.show import data_text, is_config, run_data_text, samples_text

    if is_config(what):
        if samples is None:
            click.echo(run_data_text(what, overrides, step=step, ranks=ranks, rank=rank, tokenizer=tokenizer))
        elif any(given is not None for given in (step, rank, ranks)):
            raise click.UsageError("--samples shows the beginning of a run: it goes without --step, --rank and --ranks")
        else:
            click.echo(samples_text(what, overrides, samples, tokenizer))
    elif overrides or any(given is not None for given in (step, rank, ranks, samples)):
        raise click.UsageError(
            f"--step, --rank, --ranks, --samples and a.b=c belong to a CONFIG; {what} is a PREFIX of token files"
        )
    else:
        click.echo(data_text(what, tokenizer, documents, start))


@data.command("verify", short_help="Compare token files with their checksums.")
@click.argument("what", nargs=-1, required=True, metavar="PREFIX...|CONFIG [a.b=c]...")
def data_verify(what: tuple[str, ...]) -> None:
    """Compare token files with the checksums that were written with them, byte for byte; exits with 3 and names the
    bytes if any are damaged.

    PREFIX: files of PREFIX.bin and PREFIX.idx. CONFIG (or a run's folder): all token files that the run reads.
    """
    from phalanx.cli.show import data_prefixes, is_config, verify_text

    for line in verify_text(data_prefixes(what[0], what[1:]) if is_config(what[0]) else what):
        click.echo(line)


for name, where, line in (  # imported when they are used: `phalanx --help` must not wait for them
    ("preflight", "preflight:preflight", "Check the nodes of a run before it starts."),
    ("eval", "evaluate:evaluate", "Score a checkpoint: perplexity, tasks."),
    ("generate", "generate:generate", "Make text with a checkpoint."),
    ("chat", "chat:chat", "Talk to a checkpoint in the terminal."),
    ("serve", "serve:serve", "Serve a checkpoint: OpenAI's API and a chat page."),
    ("embed", "embed:embed", "Embeddings of texts, as a folder of vectors."),
    ("index", "index:index", "An index of vectors, for retrieval."),
    ("launch", "launch:launch", "Write the job that trains a run on a cluster, and submit it."),
    ("status", "launch:status", "Who trains a run, since when, or why it waits."),
    ("logs", "launch:logs", "What a submitted run says."),
    ("checkpoint", "checkpoints:checkpoint", "Inspect, compare and convert checkpoints."),
    ("export", "checkpoints:export", "Write a checkpoint's weights for others."),
    ("import", "checkpoints:import_", "Make a Hugging Face folder of third-party weights."),
    ("import-config", "import_config:import_config", "Turn another framework's config into a config."),
):
    cli.add_elsewhere(name, f"phalanx.cli.{where}", line)
for name, where in (
    ("preflight-node", "preflight:preflight_node"),
    ("launch-node", "launch:launch_node"),
    ("launch-pods", "launch:launch_pods"),
    ("launch-ray", "launch_ray:launch_on_ray"),
):
    cli.add_elsewhere(name, f"phalanx.cli.{where}", "", hidden=True)


@cli.group(cls=Verbs)
def bench() -> None:
    """Measure speed: ops, links between ranks, whole steps."""


REPEATS = click.option(
    "--repeats", type=click.IntRange(min=1), default=10, show_default=True, help="Measurements; the median is shown."
)


@bench.command("step", short_help="Time a config's training step, and say where it goes.")
@CONFIG
@OVERRIDES
@RANKS
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Timed steps.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=10, show_default=True, help="Steps before them; 0: no step budget."
)
@JSON
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    default=None,
    help="Keep the trace of rank 0 here (.json or .json.gz, for Perfetto).",
)
@FORCE
def bench_step(
    config: str,
    overrides: tuple[str, ...],
    ranks: int | None,
    steps: int,
    warmup: int,
    out: str | None,
    trace: str | None,
    force: bool,
) -> None:
    """Time the real training step of CONFIG: ms, tokens/s, MFU, memory by kind, and the step budget. Without data:
    made-up tokens."""
    from phalanx.cli.setup import arguments, check_memory, prepare

    ready = check_memory(prepare(config, _with_tokens(config, overrides), ranks), force)
    run_ranks(
        "phalanx.bench.step:bench_step",
        ready,
        {**arguments(ready.run), "steps": steps, "warmup": warmup, "out": out, "trace": trace},
        None,
    )


@bench.command("ops", short_help="Time each op at a config's shapes.")
@click.argument("config", metavar="[CONFIG]", required=False, shell_complete=configs)
@OVERRIDES
@RANKS
@REPEATS
@click.option(
    "--only",
    metavar="OP,...",
    default=None,
    help="These ops alone, by each implementation, beside what memory and matmuls take at least. Those that CONFIG "
    "does not call, and all without CONFIG: at the shapes of a published model.",
)
@JSON
def bench_ops(
    config: str | None, overrides: tuple[str, ...], ranks: int | None, repeats: int, only: str | None, out: str | None
) -> None:
    """Time each op at the shapes of one rank of CONFIG, forward and forward+backward, against ceilings measured in
    the same run."""
    from phalanx.bench.floors import UnknownOp, bench_only, called_samples, draw_for
    from phalanx.bench.ops import bench_ops as measure
    from phalanx.cli.setup import prepare_elsewhere
    from phalanx.comm.mesh import local_device
    from phalanx.training.machine import describe_machine

    if config is None and only is None:
        raise click.UsageError("give CONFIG, or name ops: phalanx bench ops --only scan,conv,muon")
    ready = None if config is None else prepare_elsewhere(config, _with_tokens(config, overrides), ranks)
    device = local_device(describe_machine(ready.run.train.device if ready else "auto").device, 0)
    if only is None:
        measure(ready.run, ready.ranks, device, repeats, out, click.echo)  # type: ignore[union-attr]
        return
    called = [] if ready is None else called_samples(ready.run, ready.ranks, device)
    draw, names = draw_for(ready.run if ready else None, device), [name.strip() for name in only.split(",")]
    try:
        bench_only(names, called, draw, repeats, out, click.echo)
    except UnknownOp as error:
        raise click.BadParameter(str(error), param_hint="--only") from None


@bench.command("comm", short_help="Measure the links between ranks.")
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    default=None,
    metavar="N",
    help="Number of ranks (default: all GPUs; on a CPU 2).",
)
@click.option("--sizes", default=None, metavar="MIB,...", help="Sizes in MiB (default: 1,8,64,512; on a CPU 1,8).")
@REPEATS
@JSON
def bench_comm(ranks: int | None, sizes: str | None, repeats: int, out: str | None) -> None:
    """Measure all_reduce, all_gather, reduce_scatter and send/recv: time and bus bandwidth by size."""
    from phalanx.cli.setup import PreparedRun
    from phalanx.launch.env import read_placement
    from phalanx.training.machine import describe_machine

    machine, (placement, problems) = describe_machine("auto"), read_placement(os.environ)
    gpu = machine.device == "cuda"
    world = placement.world_size if placement else ranks or (machine.device_count or 1 if gpu else 2)
    if (
        problems
        or world < 2
        or (placement and ranks not in (None, world))
        or (gpu and placement is None and world > (machine.device_count or 0))
    ):
        there = f"{machine.device_count} GPUs here" if gpu else "no GPU here"
        raise click.BadParameter(
            f"{world} ranks, but it takes at least 2, one per GPU where there are GPUs ({there})", param_hint="--ranks"
        )
    try:
        mib = [float(s) for s in (sizes or ("1,8,64,512" if gpu else "1,8")).split(",")]
    except ValueError:
        raise click.BadParameter(f"{sizes!r} is not MIB,MIB,... such as 1,64", param_hint="--sizes") from None
    values = {"device": machine.device, "sizes": mib, "repeats": repeats, "out": out}
    run_ranks("phalanx.bench.comm:bench_comm", PreparedRun(None, world, placement), values, None)  # type: ignore[arg-type]


@bench.command("sweep", short_help="Time steps of many configurations.")
@CONFIG
@OVERRIDES
@RANKS
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Timed steps of each.")
@click.option("--warmup", type=click.IntRange(min=0), default=10, show_default=True, help="Steps before them.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds for each.")
@JSON
def bench_sweep(
    config: str, overrides: tuple[str, ...], ranks: int | None, steps: int, warmup: int, timeout: float, out: str | None
) -> None:
    """`bench step` for every combination of values: layout.tp=1,2,4 train.micro_batch=1,2. Sorted by tokens/s; out
    of memory is a row."""
    import json

    from phalanx.bench.sweep import sweep, sweep_table

    options = ["--steps", str(steps), "--warmup", str(warmup), *(["--ranks", str(ranks)] if ranks else [])]
    rows = sweep(config, overrides, options, timeout, click.echo)
    click.echo(sweep_table(rows))
    if out:
        Path(out).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _with_tokens(config: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Overrides that give a config without data mock tokens: speed does not depend on them."""
    from phalanx.config.read import read
    from phalanx.data.config import DataConfig

    run = read(config, overrides).run
    return (*overrides, "data.mock=true") if run is not None and run.data == DataConfig() else overrides


def main(argv: list[str] | None = None) -> None:
    """Run the program and exit with its code: errors that a user can cause are printed once, without a traceback."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler prints its own stages
    # why: comm.mesh.many_queues; here, before CUDA is looked at
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # a * b + c is rounded once, as before; Triton 3.9 warns that 3.10 will change the default
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    # cache its compiled kernels, like Triton and quack
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.expanduser("~/.cache/phalanx/flash-attn"))
    if "_PHALANX_COMPLETE" in os.environ:
        use_bash()
    code = guarded(lambda: cli.main(args=argv, prog_name="phalanx", standalone_mode=False))
    flush_quietly()
    sys.exit(code)


def guarded(call: Callable[[], Any]) -> int:
    try:
        call()
        return 0
    except PhalanxError as error:
        with suppress(OSError):  # a console on a full disk
            click.echo(describe(error), err=True)
        explain_end(describe(error))
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped by Ctrl-C", err=True)
        return 130
    except Exception as error:
        if refusal(error) is None:
            raise
        click.echo(describe(error), err=True)
        return 1
