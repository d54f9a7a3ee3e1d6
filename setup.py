"""The one thing that pyproject.toml cannot say: recipes/ is the sub-package `phalanx.recipes` of what is installed."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["phalanx", "phalanx.*"]), "phalanx.recipes"],
    package_dir={"phalanx.recipes": "recipes"},
    package_data={
        "phalanx": ["py.typed"],
        "phalanx.server": ["page.html"],
        "phalanx.launch": ["templates/*"],
        "phalanx.recipes": ["*.yaml", "deployment/*"],
    },
)
