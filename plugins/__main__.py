"""`python -m dspine_plugins OUTPUT_DIR [--archs 80,90]` builds the plugin libraries from a shell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dspine_plugins.build import build_plugins

from dspine_export.errors import DspineError


def main(arguments: list[str] | None = None) -> int:
    """Builds, prints what was built, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dspine_plugins", description="Build the TensorRT plugin libraries."
    )
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--tensorrt-root", type=Path, help="directory of the TensorRT headers")
    parser.add_argument("--archs", help="compute capabilities, for example 80,90")
    parser.add_argument("--harness", action="store_true", help="also build the library of tools/check_plugins_gpu.py")
    options = parser.parse_args(arguments)
    archs = options.archs.split(",") if options.archs else None
    try:
        built = build_plugins(options.output_dir, options.tensorrt_root, archs, harness=options.harness)
    except DspineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{built.path}  ABI {built.abi.major}.{built.abi.minor}, sm_{', sm_'.join(built.abi.architectures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
