"""Compiled code of others is not loaded: another owner, a mode that lets others write, changed bytes."""

import os
from pathlib import Path

import pytest

from backends.torch_backend.compiled.trust import UntrustedError, make_private, seal, verify


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "code"
    make_private(folder)
    draft = folder / "draft"
    draft.write_bytes(b"code")
    draft.chmod(0o600)
    seal(draft, folder / "kernels.so")
    return folder / "kernels.so"


def test_own_files_are_loaded(sealed: Path) -> None:
    verify(sealed)
    make_private(sealed.parent)
    assert sealed.parent.stat().st_mode & 0o777 == 0o700
    assert not (sealed.parent / "draft").exists()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o755])
def test_a_folder_open_to_others_is_refused(sealed: Path, mode: int) -> None:
    sealed.parent.chmod(mode)
    with pytest.raises(UntrustedError, match="open to other users"):
        make_private(sealed.parent)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(sealed: Path, mode: int) -> None:
    sealed.chmod(mode)
    with pytest.raises(UntrustedError, match="may write"):
        verify(sealed)


def test_code_of_another_user_is_refused(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UntrustedError, match="belongs to user"):
        verify(sealed)
    with pytest.raises(UntrustedError, match="belongs to user"):
        make_private(sealed.parent)


def test_changed_and_unknown_files_are_refused(sealed: Path) -> None:
    sealed.write_bytes(b"c0de")
    with pytest.raises(UntrustedError, match="differs from its checksum"):
        verify(sealed)
    unknown = sealed.with_name("graph")
    unknown.write_bytes(b"code")
    with pytest.raises(UntrustedError, match="cannot be checked"):
        verify(unknown)


def test_links_are_refused(sealed: Path, tmp_path: Path) -> None:
    link = sealed.with_name("link.so")
    link.symlink_to(sealed)
    with pytest.raises(UntrustedError, match="is no file"):
        verify(link)
    (tmp_path / "link").symlink_to(sealed.parent)
    with pytest.raises(UntrustedError, match="is no folder"):
        make_private(tmp_path / "link")
