"""Installs the package and builds the stages that STAGES names; the work is done in stages/toolkit/build.py.

Three ways to use it:
    STAGES=12 pip install -e .            install, and build stage 12; the others are built at their first use
    STAGES=all pip install .              a wheel that holds all modules, for machines without a compiler
    python setup.py build_ext --inplace   build all stages, or those that STAGES names
"""

import os
import shutil
import sys
from pathlib import Path

try:
    import setuptools
    from setuptools import Distribution, find_packages, setup
    from setuptools.command.build_ext import build_ext
    from setuptools.command.build_py import build_py

    assert int(setuptools.__version__.split(".")[0]) >= 77
except (ImportError, AssertionError):
    raise SystemExit("error: setup.py needs a newer setuptools: pip install 'setuptools>=77' pybind11") from None

HERE = Path(__file__).resolve().parent

# Not `from stages.toolkit`: importing the package `stages` would import torch, which a build does not need.
sys.path.insert(0, str(HERE / "stages"))
from toolkit import build  # noqa: E402


class StagesDistribution(Distribution):
    def has_ext_modules(self):
        """Whether pip builds modules: then the wheel is for this platform, otherwise for any."""
        return bool(os.environ.get("STAGES"))


class BuildSources(build_py):
    def run(self):
        if not self.editable_mode:
            # Modules left there by an earlier build, of other stages perhaps, must not slip into a wheel.
            shutil.rmtree(Path(self.build_lib, "stages"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copytree(HERE / "common", Path(self.build_lib, "stages", "_include", "common"))


class BuildStages(build_ext):
    built = ()

    def run(self):
        try:
            names = build.select(os.environ.get("STAGES") or "all")
            self.built = build.build(names, jobs=self.parallel, force=bool(self.force))
        except build.BuildError as error:
            raise SystemExit(f"error: {error}") from None
        if not self.inplace:
            for module, copy in zip(self.built, self.get_outputs(), strict=True):
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copy2(module, copy)

    def get_outputs(self):
        return [] if self.inplace else [str(Path(self.build_lib, path.relative_to(HERE))) for path in self.built]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []


setup(
    distclass=StagesDistribution,
    cmdclass={"build_py": BuildSources, "build_ext": BuildStages},
    packages=find_packages(include=["stages", "stages.*"]),
    package_data={"stages": ["[0-9]*/*.py", "[0-9]*/kernel.cu", "[0-9]*/binding.cpp", "measured/*.json"]},
)
