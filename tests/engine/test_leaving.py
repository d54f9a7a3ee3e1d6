"""How a rank leaves the others: in order, unless an error leaves kernels of NCCL behind that nobody ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from phalanx.base.placement import Placement
from phalanx.config.read import load_run
from phalanx.engine import meeting

RUN = load_run("recipes/tiny_llama.yaml", ("data.mock=true",))


def noted(monkeypatch, kind: str) -> list[str]:
    """Nothing is connected; what would be closed is noted. tests/gpu/ends.py has the same with NCCL."""
    found: list[str] = []
    monkeypatch.setattr(meeting, "device_of", lambda run, placement: torch.device(kind))
    monkeypatch.setattr(meeting, "join_world", lambda *_: None)
    monkeypatch.setattr(meeting, "meet", lambda *_: "folder")
    monkeypatch.setattr(meeting, "Mesh", lambda *_: SimpleNamespace(close=lambda: found.append("mesh")))
    monkeypatch.setattr(meeting, "leave_world", lambda: found.append("world"))
    return found


def join(kind: str, ranks: int):
    return meeting.joined_mesh(RUN, Placement(world_size=ranks), meeting.identity(RUN, torch.device(kind)))


@pytest.mark.parametrize(
    "kind, ranks, left", [("cuda", 2, []), ("cuda", 1, ["mesh", "world"]), ("cpu", 2, ["mesh", "world"])]
)
def test_after_an_error_ranks_with_gpus_do_not_leave(monkeypatch, kind, ranks, left):
    found = noted(monkeypatch, kind)
    with pytest.raises(KeyError, match="planted"), join(kind, ranks):
        raise KeyError("planted")
    assert found == left


def test_without_one_they_do(monkeypatch):
    found = noted(monkeypatch, "cuda")
    with join("cuda", 2) as (_, folder):
        assert folder == "folder" and found == []
    assert found == ["mesh", "world"]


def test_a_refusal_before_there_are_groups_leaves_the_world(monkeypatch):
    def refused(*_: object) -> str:
        raise ValueError("refused")

    found = noted(monkeypatch, "cuda")
    monkeypatch.setattr(meeting, "meet", refused)
    with pytest.raises(ValueError, match="refused"), join("cuda", 2):
        pass
    assert found == ["world"]
