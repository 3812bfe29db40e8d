"""A bundle appears all at once or not at all, whatever interrupts the build."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dspine_export.bundle import open_bundle, staged_bundle, write_manifest
from dspine_export.bundle import staging as staging_module
from dspine_export.errors import OutputError

from .conftest import manifest_of

Publish = Callable[..., None]
HOLDER = """
import sys, time
from pathlib import Path
from dspine_export.bundle import staged_bundle
with staged_bundle(Path(sys.argv[1]), force=True) as staging:
    (staging / "part").write_text("half")
    print("building", flush=True)
    time.sleep(120)
"""


def start_holder(output: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, output], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    return process


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "out")


def content(output: Path) -> str:
    return open_bundle(output, check_hashes=True).file("onnx/draft.onnx").read_text()


def content_without_check(output: Path) -> str:
    return (output / "onnx" / "draft.onnx").read_text()


def test_publish_leaves_only_the_bundle(tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "deep" / "er" / "out", "one")
    assert content(tmp_path / "deep" / "er" / "out") == "one"
    assert leftovers(tmp_path / "deep" / "er") == []


def test_empty_directory_is_free(tmp_path: Path, publish: Publish) -> None:
    (tmp_path / "out").mkdir()
    publish(tmp_path / "out", "one")
    assert content(tmp_path / "out") == "one"


def test_existing_bundle_needs_force(tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "out", "one")
    with pytest.raises(OutputError, match="--force"):
        publish(tmp_path / "out", "two")
    assert content(tmp_path / "out") == "one"
    publish(tmp_path / "out", "two", force=True)
    assert content(tmp_path / "out") == "two"
    assert leftovers(tmp_path) == []


def test_replacing_without_exchange(tmp_path: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "_exchange", lambda first, second: False)
    publish(tmp_path / "out", "one")
    publish(tmp_path / "out", "two", force=True)
    assert content(tmp_path / "out") == "two"
    assert leftovers(tmp_path) == []


def test_replacing_a_bundle_that_was_made_read_only(tmp_path: Path, publish: Publish) -> None:
    """Root may write there anyway: it shows under a user's account only."""
    publish(tmp_path / "out", "one")
    for folder in (tmp_path / "out" / "onnx", tmp_path / "out"):
        folder.chmod(0o555)
    publish(tmp_path / "out", "two", force=True)
    assert content(tmp_path / "out") == "two"
    assert leftovers(tmp_path) == []


def test_half_replaced_bundle_comes_back(tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "out", "one")
    (tmp_path / "out").rename(tmp_path / ".out.replaced-1-x")  # where a kill between the two renames leaves it
    with pytest.raises(OutputError, match="--force"):
        publish(tmp_path / "out", "two")
    assert content(tmp_path / "out") == "one"
    assert leftovers(tmp_path) == []


def test_force_never_overwrites_other_files(tmp_path: Path, publish: Publish) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="not a dspine bundle"):
        publish(tmp_path / "out", "one", force=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "onnx/notes.txt"])
def test_force_never_deletes_files_beside_the_bundle(name: str, tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "out", "one")
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(OutputError, match="does not list"):
        publish(tmp_path / "out", "two", force=True)
    assert (tmp_path / "out" / name).read_text() == "mine"
    assert content_without_check(tmp_path / "out") == "one"


def test_force_never_follows_or_deletes_a_link(tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "out", "one")
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="does not list"):
        publish(tmp_path / "out", "two", force=True)


def test_force_replaces_a_damaged_bundle(tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "out", "one")
    (tmp_path / "out" / "onnx" / "draft.onnx").unlink()
    publish(tmp_path / "out", "two", force=True)
    assert content(tmp_path / "out") == "two"


def test_output_is_a_file(tmp_path: Path, publish: Publish) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="not a directory"):
        publish(tmp_path / "out", "one", force=True)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_failure_keeps_the_old_bundle(error: BaseException, tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "out", "one")
    with pytest.raises(type(error)), staged_bundle(tmp_path / "out", force=True) as staging:
        (staging / "part").write_text("half")
        raise error
    assert content(tmp_path / "out") == "one"
    assert leftovers(tmp_path) == []


def test_failure_removes_parents_it_made(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_bundle(tmp_path / "a" / "b" / "out"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_seeded_bundle_shares_files(tmp_path: Path, publish: Publish) -> None:
    publish(tmp_path / "out", "one")
    seed = open_bundle(tmp_path / "out")
    inode = seed.file("onnx/draft.onnx").stat().st_ino
    with staged_bundle(tmp_path / "out", force=True, seed=seed) as staging:
        (staging / "report.json").write_text("{}")
        write_manifest(staging, manifest_of(staging))
    after = open_bundle(tmp_path / "out", check_hashes=True)
    assert after.file("onnx/draft.onnx").stat().st_ino == inode
    assert after.file("report.json").is_file()


def test_killed_build_is_cleaned_by_the_next(tmp_path: Path, publish: Publish) -> None:
    holder = start_holder(tmp_path / "out")
    holder.kill()
    holder.communicate()
    assert any(name.startswith(".out.building-") for name in leftovers(tmp_path))
    assert not (tmp_path / "out").exists()
    publish(tmp_path / "out", "two")
    assert content(tmp_path / "out") == "two"
    assert leftovers(tmp_path) == []


def test_lock_names_its_holder(tmp_path: Path, publish: Publish) -> None:
    holder = start_holder(tmp_path / "out")
    try:
        with pytest.raises(OutputError, match=f"process {holder.pid}"):
            publish(tmp_path / "out", "two")
        publish(tmp_path / "other", "free")
    finally:
        holder.send_signal(signal.SIGINT)
        _, errors = holder.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert sorted(os.listdir(tmp_path)) == ["other"]


def test_many_builders_take_turns(tmp_path: Path) -> None:
    """However many race, each either publishes or is told about the lock, and the result is whole."""
    code = """
import sys, time; from pathlib import Path
from tests.bundle.conftest import publish; from dspine_export.errors import OutputError
done = 0
for _ in range(40):
    try: publish(Path(sys.argv[1]), sys.argv[2], force=True); done += 1
    except OutputError as error: assert "another build" in str(error), error; time.sleep(0.001)
print(done)
"""
    root = Path(__file__).parents[2]
    run = [sys.executable, "-c", code, tmp_path / "out"]
    racers = [
        subprocess.Popen([*run, str(n)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    results = [racer.communicate(timeout=120) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers), results
    assert sum(int(out) for out, _ in results) > 0
    assert content(tmp_path / "out") in {"0", "1", "2"}
    assert leftovers(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A two-megabyte file system."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], capture_output=True, check=False
    ).returncode:
        pytest.skip("cannot mount a small file system here")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_disk_full(tiny_disk: Path) -> None:
    with pytest.raises(OutputError, match="disk is full"), staged_bundle(tiny_disk / "out") as staging:
        (staging / "big").write_bytes(bytes(3 << 20))
    assert list(tiny_disk.iterdir()) == []


def test_disk_full_behind_another_error(tiny_disk: Path) -> None:
    """A library that reports its failed write as something else does not hide the cause."""
    with pytest.raises(OutputError, match="disk is full"), staged_bundle(tiny_disk / "out") as staging:
        try:
            (staging / "big").write_bytes(bytes(3 << 20))
        except OSError:
            raise RuntimeError("serialization failed") from None
    assert list(tiny_disk.iterdir()) == []


def test_file_size_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OutputError, match="file-size limit"), staged_bundle(tmp_path / "out") as staging:
            (staging / "big").write_bytes(bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """Permissions do not bind root: become somebody else, with a directory that anybody can reach and nobody can write."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(user)
        Path(folder).chmod(0o755)


@pytest.mark.parametrize("name", ["out", "deep/out"])
def test_not_writable(name: str, ordinary_user: Path, publish: Publish) -> None:
    with pytest.raises(OutputError, match="parent directory cannot be"):
        publish(ordinary_user / name, "one")
    assert list(ordinary_user.iterdir()) == []
