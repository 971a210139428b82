"""Blocks of prompts as files: found again after a restart, and never trusted."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.interface import ArchiveStats
from backends.torch_backend import prefix_archive, prefix_store
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import DeviceName, DtypeName, Quantization, TorchBackendConfig
from backends.torch_backend.model.probe import LayerSpec
from backends.torch_backend.prefix_archive import FileArchive
from backends.torch_backend.prefix_store import PrefixStore
from cache.pool_options import KVCacheDtype, PoolOptions
from cache.slots import PlaneSpec
from scheduler.messages import ResetPrefixes
from tests.backends.checkpoints import save_checkpoint
from tests.backends.torch_backend.test_prefix_store import (
    BLOCK,
    SNAPSTREAM,
    ask,
    prompt_of,
    small_blocks,  # noqa: F401 — a fixture
)
from tests.scheduler.drive import Drive

LENGTH = 60
NUM_BLOCKS = LENGTH // BLOCK
Serve = Callable[..., Drive]


@pytest.fixture
def serve_from(tmp_path: Path) -> Serve:
    """Return a function that starts a server with an archive in `tmp_path`/blocks."""
    config = TorchBackendConfig(
        str(save_checkpoint("llama", tmp_path / "model")),
        device=DeviceName.CPU,
        dtype=DtypeName.BFLOAT16,
        pools=(PoolOptions(2, SNAPSTREAM),),
        max_model_len=256,
        prefill_chunk=BLOCK,
        prefix_cache_bytes=1 << 20,
        prefix_cache_dir=tmp_path / "blocks",
    )
    return lambda **changes: Drive(backend=TorchBackend(replace(config, **changes)))


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "blocks").glob("*/*.block"))


def fill(serve_from: Serve, **changes: object) -> list[object]:
    """Ask once and stop the server; return the answer."""
    drive = serve_from(**changes)
    with closing(drive.backend):
        return list(ask(drive, "cold", prompt_of(LENGTH), max_tokens=4).tokens[0])


def num_cached(serve_from: Serve, **changes: object) -> int:
    drive = serve_from(**changes)
    with closing(drive.backend):
        return ask(drive, "again", prompt_of(LENGTH), max_tokens=4).final.num_cached_tokens


def test_a_restarted_server_finds_its_blocks(serve_from: Serve, tmp_path: Path) -> None:
    cold = fill(serve_from)
    assert len(files(tmp_path)) == NUM_BLOCKS
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}
    drive = serve_from()
    with closing(drive.backend):
        hit = ask(drive, "hit", prompt_of(LENGTH), max_tokens=4)
        archive = drive.scheduler.stats().prefixes.archive
    assert archive == ArchiveStats(NUM_BLOCKS, 0, NUM_BLOCKS, is_saving=True)
    assert hit.final.num_cached_tokens == 56
    assert hit.tokens[0] == cold


def test_blocks_of_each_type_are_found_by_servers_of_that_type(serve_from: Serve, tmp_path: Path) -> None:
    """Exact blocks are not taken for codes, nor rounded ones for exact ones."""
    fill(serve_from, prefix_cache_dtype=KVCacheDtype.INT8)
    rounded = files(tmp_path)
    assert len(rounded) == NUM_BLOCKS
    assert num_cached(serve_from, prefix_cache_dtype=KVCacheDtype.FP8) == 0
    assert num_cached(serve_from) == 0
    exact = [path for path in files(tmp_path) if path.parent.name in rounded[0].parent.name]
    assert exact[0].stat().st_size > 1.5 * rounded[0].stat().st_size
    for kind in KVCacheDtype:
        assert num_cached(serve_from, prefix_cache_dtype=kind) == NUM_BLOCKS * BLOCK


def test_servers_share_a_folder(serve_from: Serve, tmp_path: Path) -> None:
    first, second = serve_from(), serve_from()
    with closing(first.backend), closing(second.backend):
        ask(first, "cold", prompt_of(LENGTH))
        end = time.monotonic() + 10
        while len(files(tmp_path)) < NUM_BLOCKS:
            assert time.monotonic() < end, files(tmp_path)
            time.sleep(0.01)
        assert ask(second, "hit", prompt_of(LENGTH)).final.num_cached_tokens == 56


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data + b"x",
        lambda _data: b"",
    ],
    ids=["cut", "flipped bit", "other format", "longer", "empty"],
)
def test_a_broken_file_is_a_miss(
    serve_from: Serve, tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cold = fill(serve_from)
    for path in files(tmp_path):
        path.write_bytes(damage(path.read_bytes()))
    drive = serve_from()
    with closing(drive.backend):
        again = ask(drive, "again", prompt_of(LENGTH), max_tokens=4)
    assert again.final.num_cached_tokens == 0
    assert again.tokens[0] == cold
    assert "is broken" in caplog.text
    assert num_cached(serve_from) == 56, "it was written again"


def test_a_file_of_another_block_is_a_miss(serve_from: Serve, tmp_path: Path) -> None:
    fill(serve_from)
    first, second, *_ = files(tmp_path)
    content = first.read_bytes()
    for path in files(tmp_path):
        path.write_bytes(content if path != first else second.read_bytes())
    assert num_cached(serve_from) == 0


def test_another_models_blocks_are_not_found(serve_from: Serve, tmp_path: Path) -> None:
    fill(serve_from)
    other = str(save_checkpoint("qwen3", tmp_path / "other"))
    assert num_cached(serve_from, model=other) == 0
    assert num_cached(serve_from, dtype=DtypeName.FLOAT32) == 0
    assert num_cached(serve_from, quantization=Quantization.INT8) == 0
    assert num_cached(serve_from) == 56


def test_a_reset_deletes_the_files(serve_from: Serve, tmp_path: Path) -> None:
    drive = serve_from()
    with closing(drive.backend):
        ask(drive, "cold", prompt_of(LENGTH))
        drive.run(ResetPrefixes())
        assert files(tmp_path) == []
    assert files(tmp_path) == []


def test_a_full_disk_turns_writing_off(
    serve_from: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fill(serve_from)
    monkeypatch.setattr(Path, "replace", full)
    drive = serve_from()
    with closing(drive.backend), caplog.at_level(logging.WARNING):
        ask(drive, "other", prompt_of(LENGTH, seed=1))
        assert ask(drive, "hit", prompt_of(LENGTH)).final.num_cached_tokens == 56, "reading goes on"
        assert drive.scheduler.stats().prefixes.archive == ArchiveStats(NUM_BLOCKS, 0, NUM_BLOCKS)
    assert "stored prompts are no longer written" in caplog.text
    assert "No space left on device" in caplog.text
    assert len(list((tmp_path / "blocks").glob("*/*"))) == NUM_BLOCKS


def test_a_folder_that_cannot_be_made_is_refused(serve_from: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="prefix_cache_dir must be a folder that can be written"):
        serve_from(prefix_cache_dir=tmp_path / "file")
    with pytest.raises(ValueError, match="prefix_cache_dir needs prefix_cache_bytes"):
        serve_from(prefix_cache_bytes=0)
    with pytest.raises(ValueError, match="prefix_cache_disk_bytes must be at least"):
        serve_from(prefix_cache_disk_bytes=5)


def store_of(num_blocks: int) -> PrefixStore:

    layers = (
        LayerSpec(2, 1, (PlaneSpec("key", 4, torch.bfloat16), PlaneSpec("value", 2, torch.float32)), None),
    )
    described = prefix_store.prefix_spec(num_blocks * 128, layers)
    assert described is not None
    assert described.num_blocks == num_blocks
    return PrefixStore(described, layers, torch.device("cpu"))


def key_of(index: int) -> bytes:
    return index.to_bytes(32, "big")


def test_the_limit_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    store = store_of(1)
    store.fill(0, memoryview(bytearray(range(128))))
    limit = 2000
    archive = FileArchive(tmp_path, limit, "model", store)
    for index in range(40):
        archive.save(key_of(index), 0)
        end = time.monotonic() + 10
        while not (tmp_path / "model" / f"{key_of(index).hex()}.block").exists():
            assert time.monotonic() < end
            time.sleep(0.001)
        os.utime(tmp_path / "model" / f"{key_of(index).hex()}.block", (index, index))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= limit
    archive.close()
    held = [archive.load(key_of(index), 0) for index in range(40)]
    assert held[-8:] == [True] * 8
    assert not any(held[:25])
    assert store.dump(0) == bytes(range(128))


def test_a_block_in_memory_is_not_evicted_for_its_age(tmp_path: Path) -> None:
    archive = FileArchive(tmp_path, 2000, "model", store_of(2))
    popular, others = key_of(0), [key_of(index) for index in range(1, 30)]
    archive.save(popular, 0)
    for key in others:
        archive.save(key, 1)
        while archive._num_queued_bytes:
            time.sleep(0.001)
        for path in tmp_path.glob("*/*"):  # all are old, the popular one is the oldest
            os.utime(path, (0, 0) if path.stem == popular.hex() else (1, 1))
    archive.close()
    assert archive.load(popular, 0)
    assert not archive.load(others[0], 1)


def test_what_a_killed_server_left_unfinished_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    abandoned, under_way = (folder / f".{digit * 32}.unfinished" for digit in "ab")
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    under_way.write_bytes(b"under way")
    FileArchive(tmp_path, 1000, "model", store_of(1)).close()
    assert list(folder.iterdir()) == [under_way]


_WRITE_WITHOUT_END = """
import sys
from pathlib import Path
from backends.torch_backend.prefix_archive import FileArchive
from backends.torch_backend import prefix_store
from tests.backends.torch_backend.test_prefix_archive import BLOCK, key_of, store_of

prefix_store.BLOCK_TOKENS = BLOCK
store = store_of(1)
store.fill(0, memoryview(bytearray(range(128))))
archive = FileArchive(Path(sys.argv[1]), 10**9, "model", store)
index = int(sys.argv[2])
while True:
    archive.save(key_of(index), 0)
    index += 1
"""


@pytest.mark.long  # three processes load torch
def test_a_killed_writer_leaves_no_half_block(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for run in range(3):
        num_before = len(list(folder.glob("*.block")))
        arguments = [sys.executable, "-c", _WRITE_WITHOUT_END, str(tmp_path), str(run * 10**6)]
        with subprocess.Popen(arguments) as writer:
            while len(list(folder.glob("*.block"))) < num_before + 50:
                assert writer.poll() is None
                time.sleep(0.001)
            writer.kill()
    keys = [bytes.fromhex(path.stem) for path in folder.glob("*.block")]
    store = store_of(1)
    archive = FileArchive(tmp_path, 10**9, "model", store)
    for key in keys:
        store.fill(0, memoryview(bytearray(128)))
        assert archive.load(key, 0)
        assert store.dump(0) == bytes(range(128))
    archive.close()
    for path in folder.glob("*.unfinished"):
        os.utime(path, (0, 0))
    FileArchive(tmp_path, 10**9, "model", store).close()
    assert len(list(folder.iterdir())) == len(keys) >= 150


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    """Also where the folder is somebody's home: old hidden files and folders, and blocks of another kind."""
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    others = [project / name for name in (".env", "other.block", "notes.txt")]
    for path in others:
        path.write_bytes(b"x" * 5000)
        os.utime(path, (0, 0))
    os.utime(project / ".git", (0, 0))
    archive = FileArchive(tmp_path, 1000, "model", store_of(1))
    for index in range(20):  # more than the limit, so that files are evicted
        archive.save(key_of(index), 0)
    archive.close()
    assert sorted(project.iterdir()) == sorted([project / ".git", *others])
    assert list((tmp_path / "model").glob("*.block"))


def test_too_many_waiting_blocks_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_archive, "_MAX_QUEUED_BYTES", 500)
    monkeypatch.setattr(prefix_archive, "_MIN_QUEUED_BLOCKS", 1)
    archive = FileArchive(tmp_path, 10**6, "model", store_of(1))
    with archive._file_lock:
        for index in range(10):
            archive.save(key_of(index), 0)
    archive.close()
    assert len(list(tmp_path.glob("*/*.block"))) == 2


def test_a_block_that_waits_to_be_written_is_reset_too(tmp_path: Path) -> None:
    archive = FileArchive(tmp_path, 10**6, "model", store_of(1))
    for index in range(20):
        with archive._file_lock:
            reset = threading.Thread(target=archive.reset)
            reset.start()  # it waits for the lock first
            archive.save(key_of(index), 0)
            while not archive._queue.empty():  # the writer takes the block, and waits for the lock too
                time.sleep(0.001)
        reset.join()
        while archive._num_queued_bytes:  # the writer is still busy with it
            time.sleep(0.001)
    archive.close()
    assert not list(tmp_path.glob("*/*.block"))
