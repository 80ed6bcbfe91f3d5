"""Maps the top-level data and plug-in folders into the package; everything else is in pyproject.toml.

A new folder with an ``__init__.py`` is found by itself: adding a strategy touches no list.
"""

from setuptools import find_packages, setup

ROOMS = {
    "overlapsim.hwprofiles": "hwprofiles",
    "overlapsim.strategies": "strategies",
    "overlapsim.validate": "validate",
}

setup(
    packages=["overlapsim", *(f"overlapsim.{name}" for name in find_packages("overlapsim"))]
    + [
        name
        for package, folder in ROOMS.items()
        for name in (package, *(f"{package}.{x}" for x in find_packages(folder)))
    ],
    package_dir={"overlapsim": "overlapsim", **ROOMS},
)
