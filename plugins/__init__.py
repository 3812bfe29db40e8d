"""TensorRT plugins of the three DSpine operators: C++/CUDA sources, their build, and checks on a built library.

Public names: `build_plugins`, `find_plugins`, `load_abi`, `PluginLibrary`, `PluginAbi`. Importing this package loads neither CUDA
nor TensorRT.
"""

from __future__ import annotations

from dspine_plugins.abi import ABI_MAJOR, PluginAbi, load_abi
from dspine_plugins.build import PluginLibrary, build_plugins, find_plugins

__all__ = ["ABI_MAJOR", "PluginAbi", "PluginLibrary", "build_plugins", "find_plugins", "load_abi"]
