"""Units of several data-parallel replicas, assigned to all of their ranks (layout.media_group), and how what they
become reaches the replica whose text has a place for it.

    units of all replicas ──assign_whole──▶ rank that computes each ──UnitRoute (all-to-all)──▶ ranks of its replica

A feature is sent once, to one of the ranks of its replica. These get equal shares of the text's features, one after
another, and then gather them. So no replica has to know where in another's text the tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.sequence.sample import SharedUnits
from phalanx.sequence.shard import SequenceShard


@dataclass(frozen=True)
class UnitRoute:
    """What a rank sends and receives of features.

    rows     (s,) int64  which of the features that it computes it sends, by the rank that they go to
    send, receive  how many to each rank, and from each, by their numbers (SequenceShard.here)
    order    (share,) int64  where each feature of its share of the text's is among those that it receives; padding is
             one beyond the last
    """

    rows: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    order: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> UnitRoute:
        """The same with each of its tensors changed."""
        return replace(self, rows=change(self.rows), order=change(self.order))


def share_of(features: int, ranks: int) -> int:
    """Features of a micro-batch that each of the ranks of a replica receives, padding included."""
    return max(1, -(-features // ranks))


def route_of(shared: SharedUnits, part: SequenceShard) -> UnitRoute:
    """For a rank with this part."""
    goes, comes = list[np.ndarray](), list[np.ndarray]()
    homes = iter(shared.homes)
    for replica, counts in enumerate(shared.features):
        each, total = share_of(sum(counts), part.sharers), sum(counts)
        goes.append(replica * part.sharers + np.arange(total) // each)
        comes.append(np.repeat(np.array([next(homes) for _ in counts], np.int64), np.array(counts, np.int64)))
    to, home = np.concatenate(goes), np.concatenate(comes)
    own = to[home == part.here]
    sources = home[to == part.here]
    order = np.full(share_of(sum(shared.features[part.replica]), part.sharers), len(sources), np.int64)
    order[np.argsort(sources, kind="stable")] = np.arange(len(sources))
    return UnitRoute(
        rows=torch.from_numpy((shared.own.features // shared.own.joined)[np.argsort(own, kind="stable")]),
        send=tuple(np.bincount(own, minlength=part.everyone).tolist()),
        receive=tuple(np.bincount(sources, minlength=part.everyone).tolist()),
        order=torch.from_numpy(order),
    )


def meta_route(ids: Tensor, sent: int, features: int, part: SequenceShard) -> UnitRoute:
    """A route of which only the shapes are right: of a rank that sends so many features, all to others, and receives
    its share of as many as a micro-batch may have."""
    share = share_of(features, part.sharers)
    return UnitRoute(ids.new_empty(sent), _even(sent, part), _even(share, part), ids.new_empty(share))


def _even(count: int, part: SequenceShard) -> tuple[int, ...]:
    most: Sequence[int] = [count * (i + 1) // part.everyone for i in range(-1, part.everyone)]
    return tuple(stop - start for start, stop in zip(most, most[1:]))
