"""The wheel: it builds without the network, holds every package and nothing else, and its metadata agree with the
code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import phalanx

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing appears in the source tree."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools (requirements.txt)")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("phalanx", "tests", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(source),
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    assert path.name == f"phalanx-{phalanx.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def test_it_holds_the_package_and_nothing_else(wheel):
    info = f"phalanx-{phalanx.__version__}.dist-info/"
    code = {name for name in wheel.namelist() if not name.startswith(info)}
    files = (
        path for path in (ROOT / "phalanx").rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )  # others compile meanwhile
    recipes = (path for path in (ROOT / "recipes").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    assert code == {path.relative_to(ROOT).as_posix() for path in files} | {
        f"phalanx/{p.relative_to(ROOT).as_posix()}" for p in recipes
    }
    assert {name.removeprefix(info) for name in wheel.namelist()} >= {
        "licenses/LICENSE",
        "entry_points.txt",
        "METADATA",
    }


def test_recipes_are_found_by_name_where_it_is_installed(wheel, tmp_path):
    """With nothing of this checkout on the path, and from a folder that has none of these files."""
    wheel.extractall(tmp_path / "site")
    program = "from phalanx.cli.main import main; main(['plan', 'tiny-llama', 'layout.tp=2', '--ranks', '2'])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    names = "import phalanx.config.read as r; print(*r.recipes()); print(r.read('llama3-8b').run.dir, r.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", names], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    found, (folder, file) = done.stdout.splitlines()[0].split(), done.stdout.splitlines()[1].split()
    assert (folder, Path(file).is_relative_to(tmp_path)) == ("runs/llama3-8b", True)
    assert set(found) == {p.stem.replace("_", "-") for p in (ROOT / "recipes").iterdir() if p.is_file()}


def test_its_metadata(wheel):
    info = f"phalanx-{phalanx.__version__}.dist-info/"
    metadata = Parser().parsestr(wheel.read(info + "METADATA").decode())
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == (
        "phalanx",
        phalanx.__version__,
        "Apache-2.0",
    )
    assert metadata.get_payload().startswith("# Phalanx")
    assert "phalanx = phalanx.cli.main:main" in wheel.read(info + "entry_points.txt").decode()
    assert "Apache License" in wheel.read(info + "licenses/LICENSE").decode()


def test_every_folder_of_code_is_a_package():
    """A folder without __init__.py would be left out of the wheel in silence."""
    folders = {path.parent for path in (ROOT / "phalanx").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)
