"""Builds the native kernels into the wheel, where torch and a C++ compiler are at hand.

A library fits only the torch that it was built with. So this needs `pip wheel --no-build-isolation` in the
environment that the server will run in, or a copy of it, as the Dockerfile does. Elsewhere, and where the
compiler fails, the wheel has no kernels, and the server compiles them when it first needs them.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """The hook that hatchling finds in this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        is_possible = platform.machine() == "x86_64" and find_spec("torch") and compiler
        if version == "editable" or not is_possible:
            return
        self._folder = tempfile.TemporaryDirectory()
        module = "backends.torch_backend.native.packaged"
        command = [sys.executable, "-m", module, self._folder.name]
        if subprocess.run(command, cwd=self.root, check=False).returncode != 0:
            self.app.display_warning("The kernels could not be compiled: the wheel is built without them.")
            return
        for library in Path(self._folder.name).glob("*.so"):
            target = f"backends/torch_backend/native/built/{library.name}"
            build_data["force_include"][str(library)] = target
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
