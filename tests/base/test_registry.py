"""The registry: names of ours, of this process, of installed packages and of the user's; what a wrong one is told."""

from __future__ import annotations

import abc
import sys
from importlib.metadata import EntryPoint

import pytest

from phalanx.base import registry
from phalanx.base.registry import NotFound, RegisteredTwice, find, names, path_of, register


class Shape(abc.ABC):
    """A protocol."""

    @abc.abstractmethod
    def area(self, scale: float) -> float: ...

    def name(self) -> str:
        return "shape"


class Square(Shape):
    def area(self, scale: float) -> float:
        return scale


class Nothing(Shape):
    pass


class Foreign:
    def area(self, scale: float) -> float:
        return scale


HERE = __name__


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Whatever a test registers is gone after it."""
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


def refused(name: str, protocol: type | None = None) -> NotFound:
    with pytest.raises(NotFound) as raised:
        find("shape", name, protocol)
    return raised.value


def test_a_name_is_found_wherever_it_is(monkeypatch):
    register("shape", "square", Square)
    assert find("shape", "square", Shape) is find("shape", f"{HERE}:Square", Shape) is Square
    assert path_of("shape", "square") == f"{HERE}:Square"
    assert find("shape", f"{HERE}:Square.area") is Square.area
    point = EntryPoint("box", f"{HERE}:Square", "phalanx.shape")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    assert find("shape", "box") is Square and names("shape") == ("square", "box") and names("colour") == ()


def test_ours_need_no_import_before():
    assert path_of("optimizer", "adamw") == "phalanx.optim.adamw:AdamW" and "adamw" in names("optimizer")


def test_a_second_registration_names_both_places():
    register("shape", "square", Square)
    register("colour", "square", Square)
    with pytest.raises(RegisteredTwice, match=rf"'square' is registered twice: by {HERE}:Square and by {HERE}:Foreign"):
        register("shape", "square", Foreign)
    with pytest.raises(RegisteredTwice, match=rf"by phalanx.optim.adamw:AdamW and by {HERE}:Square"):
        register("optimizer", "adamw", Square)
    assert find("shape", "square") is Square


def test_wrong_names_say_what_would_do(tmp_path, monkeypatch):
    register("shape", "square", Square)
    assert refused("sqare").rule.startswith('must be one of "square", or one of your own as PACKAGE.MODULE:NAME')
    assert refused("sqare").valid == ("square",)
    assert refused("tests.base.test_registry.Square").valid == ("tests.base.test_registry:Square",)
    assert refused("tests.base.test_registri:Square").valid[0] == "tests.base.test_registry:Square"
    assert (
        "there is no module tests.base.test_registri on Python's path"
        in refused("tests.base.test_registri:Square").rule
    )
    assert refused(f"{HERE}:Sqare").valid[0] == f"{HERE}:Square"
    assert f"{HERE} ({__file__}) has no Sqare" in refused(f"{HERE}:Sqare").rule
    assert refused("a b:c").rule == refused("a:").rule == "must be a name, or PACKAGE.MODULE:NAME"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lacks_a_package.py").write_text("x = 1\nimport not_installed_anywhere\n", encoding="utf-8")
    (tmp_path / "raises.py").write_text("x = 1\n\ny = 1 / 0\n", encoding="utf-8")
    (tmp_path / "no_python.py").write_text("x = 1\ndef\n", encoding="utf-8")
    for module, text in (
        ("lacks_a_package", "ModuleNotFoundError: No module named 'not_installed_anywhere' at {}:2"),
        ("raises", "ZeroDivisionError: division by zero at {}:3"),
        ("no_python", "at {}:2"),
    ):
        assert text.format(tmp_path / f"{module}.py") in refused(f"{module}:X").rule
        assert module not in sys.modules


def test_what_a_protocol_asks_for():
    assert refused(f"{HERE}:Nothing", Shape).rule == (
        f"is no Shape: {HERE}:Nothing has no area(self, scale: float) -> float"
    )
    assert refused(f"{HERE}:Foreign", Shape).rule == f"is no Shape: {HERE}:Foreign is not derived from phalanx.Shape"
    assert refused(f"{HERE}:HERE", Shape).rule.endswith("has no area(self, scale: float) -> float")
    register("shape", "one", Square(), where="here")
    assert find("shape", "one", Shape).area(2.0) == 2.0


def test_near_modules_hold_what_is_looked_for_in_them(tmp_path, monkeypatch):
    register("shape", "square", Square)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "solids" / "round").mkdir(parents=True)
    (tmp_path / "solids" / "round" / "balls.py").touch()
    (tmp_path / "solid.py").touch()
    for package in ("soldis", "solid_"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "solids" / "__init__.py").touch()
    assert refused("solidz.round.balls:Ball").valid == ("solids.round.balls:Ball",)
    assert refused("solidz:Ball").valid[0] in ("solid:Ball", "solids:Ball")
