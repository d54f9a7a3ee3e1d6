"""`phalanx index`: from a folder of vectors to an index of them."""

from __future__ import annotations

from typing import Any

import click

from phalanx.cli.verbs import ConfigVerb

POSITIVE = click.IntRange(min=1)


@click.command("index", cls=ConfigVerb, short_help="An index of vectors, for retrieval.")
@click.argument("vectors", type=click.Path(file_okay=False, exists=True))
@click.option("-o", "--out", required=True, type=click.Path(file_okay=False), help="Folder for the index.")
@click.option(
    "--kind",
    type=click.Choice(["exact", "ivf"]),
    default=None,
    help="exact: every vector is compared; ivf: those of the nearest cells (default: exact up to 50,000 vectors).",
)
@click.option("--lists", type=POSITIVE, default=None, help="ivf: cells (default: 4 x sqrt(vectors)).")
@click.option("--probes", type=POSITIVE, default=None, help="ivf: cells that are searched (default: by --recall).")
@click.option(
    "--recall",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.95,
    show_default=True,
    help="ivf: share of the 10 nearest that is to be found.",
)
@click.option("--query-prefix", default="", metavar="TEXT", help='Text put before each query, such as "query: ".')
def index(vectors: str, out: str, **asked: Any) -> None:
    """Index the VECTORS that `phalanx embed` wrote, with their texts, for `generate`, `chat` and `serve --index` (needs
    phalanx[index]).

    \b
      phalanx index vectors -o index
      phalanx index vectors -o index --kind ivf --recall 0.98
      phalanx generate RUN --prompt "How do I join paths?" --index index --neighbours 4
    """
    from phalanx.retrieval.index import EXACT_UP_TO, IndexOptions, build_index
    from phalanx.retrieval.vectors import VectorsFolder

    opened = VectorsFolder.open(vectors)
    kind = asked["kind"] or ("exact" if opened.manifest.texts <= EXACT_UP_TO else "ivf")
    for name in ("lists", "probes"):
        if kind == "exact" and asked[name] is not None:
            raise click.UsageError(f"--{name} does nothing for an exact index: add --kind ivf")
    made = build_index(opened, out, IndexOptions(**asked), click.echo)
    lists = f" lists={made.lists} probes={made.probes} recall@10={made.recall:.3f}" if made.kind == "ivf" else ""
    click.echo(f"index={out} kind={made.kind} texts={made.texts} width={made.width}{lists}")
