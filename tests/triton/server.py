"""A real tritonserver on free ports of the loopback interface, from the binaries inside the nvidia-pytriton wheel.

The server runs in a process session of its own: leaving the block stops it, kills what is left of the session, and removes its shared
memory. `pytriton` itself is never imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WHEEL = "nvidia-pytriton"
READY_S, STOP_S = 400.0, 40.0  # a busy machine
SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Server:
    """Addresses without a scheme, the process, its log, and the prefix of its files under /dev/shm."""

    http: str
    grpc: str
    metrics: str
    log: Path
    process: subprocess.Popen[bytes]
    prefix: str

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def shared_memory(self) -> list[Path]:
        return sorted(SHARED_MEMORY.glob(f"{self.prefix}*"))

    def stub_processes(self, model: str) -> list[int]:
        """Process ids of the Python stubs that serve ``model``."""
        import psutil

        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                command = child.cmdline()
                if "triton_python_backend_stub" in command[0] and f"/{model}/1/" in command[1]:
                    found.append(child.pid)
        return found


def wheel_folder() -> Path | None:
    """The server's folder inside the wheel, or None where it is not installed."""
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file("pytriton"))) / "tritonserver"


def install_tree(folder: Path) -> Path:
    """Lay the wheel's binaries out as NVIDIA's container has them: ``folder/{bin,backends/python}``."""
    wheel = wheel_folder()
    assert wheel is not None
    python = folder / "backends" / "python"
    python.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy2(wheel / "backends" / "python" / name, python)
    stub = wheel / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy2(stub / "triton_python_backend_stub", python)
    (python / "triton_python_backend_stub").chmod(0o755)
    (folder / "bin").mkdir()
    (folder / "bin" / "tritonserver").symlink_to(wheel / "bin" / "tritonserver")
    return folder


def environment() -> dict[str, str]:
    """This environment, in which the server's libraries and this interpreter are found."""
    wheel = wheel_folder()
    assert wheel is not None
    libraries = [wheel.parents[1] / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")]
    return os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], folder: Path, extra_environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start ``command``, the server or a script that ends in it, with its addresses appended; wait until it is ready."""
    http, grpc, metrics = free_port(), free_port(), free_port()
    prefix = f"dspine-test-{os.getpid()}-{http}-"
    log = folder / f"tritonserver-{http}.log"
    command = [
        *command,
        "--http-address=127.0.0.1",
        f"--http-port={http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc}",
        f"--metrics-port={metrics}",
        "--metrics-address=127.0.0.1",
        "--allow-gpu-metrics=false",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment() | dict(extra_environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    server = Server(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}", log, process, prefix)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _stop(server)


def ready(server: Server, path: str = "/v2/health/ready") -> bool:
    """Whether the server answers 200 at ``path``."""
    try:
        with urllib.request.urlopen(f"http://{server.http}{path}", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + READY_S
    while not ready(server):
        code = server.process.poll()
        if code is not None or time.monotonic() > deadline:
            raise RuntimeError(f"tritonserver is not ready (exit code {code}):\n{server.log_text()[-6000:]}")
        time.sleep(0.1)


def _stop(server: Server) -> None:
    server.process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    for leftover in server.shared_memory():
        leftover.unlink(missing_ok=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
