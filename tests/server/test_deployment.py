"""The deployment files: Kubernetes' own schema takes one, and a Ray cluster of three nodes runs the other.

Neither validator nor ray is needed elsewhere, so each is in an environment of its own: PHALANX_KUBERNETES_PYTHON names
the interpreter of one (`python -m venv E; E/bin/pip install kubernetes-validate`), PHALANX_RAY_PYTHON of the other
(`E/bin/pip install 'ray[serve]'`); without it a test is skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.config.read import recipes
from tests.server.test_real_engine import folder  # noqa: F401

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "recipes" / "deployment"
KUBERNETES, RAY = (os.environ.get(f"PHALANX_{name}_PYTHON") for name in ("KUBERNETES", "RAY"))

ENV = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}{os.pathsep}{DEPLOYMENT}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def test_a_deployment_is_no_recipe():
    assert not [name for name in recipes() if "kubernetes" in name or "ray" in name]


@pytest.mark.skipif(not KUBERNETES, reason="PHALANX_KUBERNETES_PYTHON names no interpreter with kubernetes-validate")
@pytest.mark.soak
def test_kubernetes_schema_takes_the_file(tmp_path):
    file = DEPLOYMENT / "kubernetes.yaml"
    program = str(Path(KUBERNETES).with_name("kubernetes-validate"))
    done = subprocess.run([program, "--strict", str(file)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("replicas: 3", "replicas: three"))
    assert subprocess.run([program, "--strict", str(wrong)], capture_output=True, timeout=100).returncode != 0


@pytest.mark.skipif(not RAY, reason="PHALANX_RAY_PYTHON names no interpreter with ray[serve]")
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_three_nodes_of_ray_answer_when_one_is_killed(folder, tmp_path):  # noqa: F811
    """Under load: requests on the node that is killed may fail, all others and all later ones are answered."""
    command = shlex.join([sys.executable, "-m", "phalanx"])
    script = ROOT / "tests" / "harness" / "ray_cluster.py"
    done = subprocess.run(
        [RAY, str(script), str(folder), command], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"before"')]  # ray speaks there too
    found = json.loads(line)
    assert found["before"] == {"200": 8} and found["after"] == {"200": 20}
    assert found["amid"]["200"] >= 100
