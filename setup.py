"""Package layout: three top-level folders get importable names after installation.

``kernels/`` -> ``dspine_kernels``, ``plugins/`` -> ``dspine_plugins``, ``recipes/`` -> ``dspine_recipes``. Everything else about the
package is in pyproject.toml; only discovery needs code.
"""

from pathlib import Path

from setuptools import find_packages, setup

MAPPED = {"dspine_kernels": "kernels", "dspine_plugins": "plugins", "dspine_recipes": "recipes"}
SOURCES = ["*.cu", "*.cuh", "*.h", "*.hpp", "*.cpp", "*.cmake", "CMakeLists.txt", "*.py.in", "*.h.in", "*.map"]


def mapped_packages() -> list[str]:
    packages = []
    for name, folder in MAPPED.items():
        if Path(folder).is_dir():
            packages += [name, *(f"{name}.{child}" for child in find_packages(folder))]
    return packages


setup(
    packages=[*find_packages(include=["dspine_export", "dspine_export.*"]), *mapped_packages()],
    package_dir=MAPPED,
    package_data={
        "dspine_export": ["py.typed", "triton/templates/*"],
        "dspine_plugins": [f"{prefix}{pattern}" for pattern in SOURCES for prefix in ("", "**/")],
        "dspine_recipes": ["*.yaml"],
    },
    include_package_data=False,
)
