"""`phalanx embed` on each rank: turns texts into a folder of vectors, shard by shard."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.placement import Placement
from phalanx.config.run import Run
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.inference.embedder import embedder_folder, load_embedder, marks_of
from phalanx.retrieval.documents import PassageFile
from phalanx.retrieval.vectors import VectorsFolder, VectorsManifest
from phalanx.sequence.sample import Pooling


@dataclass(frozen=True)
class EmbedRequest:
    """What to embed: the texts of `input` (JSONL) by the model at `path`, into the folder `out`.

    prefix      text put before each
    dimensions  features of a vector; None: all
    shard       texts in each shard
    pooling     of a folder that does not say how embeddings are made
    """

    path: str
    input: str
    out: str
    prefix: str = ""
    dimensions: int | None = None
    shard: int = 8192
    pooling: Pooling | None = None


def manifest_for(run: Run, what: EmbedRequest, texts: PassageFile) -> VectorsManifest:
    """run: the config in which the model is computed."""
    folder, width = embedder_folder(what.path, what.pooling), run.model.hidden_size
    return VectorsManifest(
        embedder=folder.fingerprint,
        model=str(folder.weights.absolute()),
        pooling=folder.facts.pooling,
        normalized=folder.facts.normalized,
        width=what.dimensions or width,
        whole=width,
        prefix=what.prefix,
        length=run.train.seq_length,
        input=texts.sha256,
        texts=texts.count,
        shard=what.shard,
        dtype="float64" if run.train.precision == "fp64" else "float32",
    )


def embed_rank(run: Run, placement: Placement, what: EmbedRequest) -> None:
    """One rank's share; rank 0 writes the folder."""
    with ExitStack() as after:
        folder, texts = embedder_folder(what.path, what.pooling), PassageFile(what.input)
        marks = marks_of(folder)
        manifest = manifest_for(run, what, texts)
        mesh, _ = after.enter_context(joined_mesh(run, placement, identity(run, device_of(run, placement), run.data)))
        first = mesh.rank == 0
        vectors = VectorsFolder.begin(what.out, manifest) if first else VectorsFolder(what.out, manifest)
        embedder, done = load_embedder(folder, run, mesh), 0
        for shard in range(manifest.shards):
            there = torch.tensor([int(first and vectors.has(shard))], device=mesh.world.device)
            if mesh.world.all_reduce(there, op="max").wait()[0]:  # rank 0 says what there is
                continue
            start, stop = manifest.part(shard)
            passages = list(texts.passages(start, stop))

            def ids_of(number: int, passages: list = passages) -> list[int]:
                return marks.encode(what.prefix + passages[number].text, embedder.most)

            found = embedder.narrowed(embedder.embed(stop - start, ids_of), what.dimensions)
            done += stop - start
            if first:
                vectors.write(shard, found.cpu().numpy(), passages)
                print(f"{stop}/{manifest.texts} texts", flush=True)
        if first:
            kept = manifest.texts - done
            beside = f" ({kept} were there)" if kept else ""
            print(f"vectors={what.out} texts={manifest.texts}{beside} width={manifest.width}", flush=True)
