"""The deployment files: Kubernetes' own schema takes one, and a Ray cluster of three nodes runs the other.

Ray Serve is not needed elsewhere, so it is in an environment of its own, whose interpreter PHALANX_RAY_PYTHON names
(`python -m venv E; E/bin/pip install 'ray[serve]'`); without it that test is skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from phalanx.config.read import recipes
from tests.server.test_real_engine import folder  # noqa: F401

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "recipes" / "deployment"
RAY = os.environ.get("PHALANX_RAY_PYTHON")

ENV = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}{os.pathsep}{DEPLOYMENT}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def test_a_deployment_is_no_recipe():
    assert not [name for name in recipes() if "kubernetes" in name or "ray" in name]


def test_kubernetes_schema_takes_the_file():
    documents = list(yaml.safe_load_all((DEPLOYMENT / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)
    documents[0]["spec"]["replicas"] = "three"
    with pytest.raises(kubernetes_validate.ValidationError, match="three"):
        kubernetes_validate.validate(documents[0], "1.37", strict=True)


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
