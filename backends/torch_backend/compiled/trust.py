"""What is loaded from the compile cache: only what this user wrote, and as it was written.

Code that another user could have written would run as this one. The folder of the code therefore belongs to
this user, and no other may read or write it. A file has its checksum beside it, which finds broken files. It
is no defence against this user's own programs.
"""

import hashlib
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(Exception):
    """Code in the cache is not loaded; the message says why."""


def make_private(folder: Path) -> None:
    """Create a folder for this user alone, or check that it is one. Raises OSError and UntrustedError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedError(f"{folder} is no folder")
    _check_owner(folder, status)
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.filemode(status.st_mode)
        raise UntrustedError(f"{folder} is open to other users ({mode}): delete it, or set its mode to 700")


def seal(draft: Path, target: Path) -> None:
    """Give a complete file its name, with its checksum beside it. Others never see the one without the other.

    The checksum comes first: a file whose checksum is another's is compiled again.
    """
    _checksum_path(target).write_text(_checksum(draft))
    draft.replace(target)


def verify(path: Path) -> None:
    """Raise UntrustedError unless this user wrote the file, and it is as it was when `seal` named it."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{path} is no file")
        _check_owner(path, status)
        if status.st_mode & _OTHERS_WRITE:
            raise UntrustedError(f"other users may write {path} ({stat.filemode(status.st_mode)})")
        if _checksum_path(path).read_text(errors="replace") != _checksum(path):
            raise UntrustedError(f"{path} differs from its checksum")
    except OSError as error:
        raise UntrustedError(f"{path} cannot be checked: {error.strerror}") from error


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise UntrustedError(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}")


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
