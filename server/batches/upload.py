"""An upload: writes the pieces of a request's body to a file in the store. Memory holds one piece at a time.

The limits are the file's size, the disk quota, the number of uploads at once (of one key and of all), and the
time waited for the sender. Without the last limit, slow senders could block all others.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import BinaryIO, Final

from starlette.datastructures import Headers

from server.batches.disk import Disk, try_lock
from server.batches.files import DEFAULT_LIFETIME, FileStore, Purpose, StoredFile, new_file_id
from server.batches.multipart import UploadForm
from server.http.errors import ApiError, invalid_value
from server.protocol.files import MAX_LIFETIME, MIN_LIFETIME

FORM_BYTES: Final = 64 * 1024  # the most that a form's body may have beyond its file
MAX_WAIT: Final = 60.0  # seconds of waiting for the sender, summed over all pieces
MIN_RATE: Final = 32 * 1024  # bytes a second: each second's worth received extends the wait by a second
MAX_FILENAME: Final = 255  # characters
PIECE_BYTES: Final = 1024 * 1024  # buffered before a write


class Upload:
    """One upload in progress. On exit from its context, a file that was not kept is removed."""

    def __init__(self, disk: Disk, files: FileStore, max_bytes: int, owner: str) -> None:
        """Raises `ApiError` if `owner` may not start another upload."""
        files.check_room(owner)
        self._disk = disk
        self._files = files
        self._max_bytes = max_bytes
        self._owner = owner
        self._id = new_file_id()
        self._path = files.draft_path(self._id)
        self._num_bytes = 0
        self._buffer = bytearray()
        self._draft: BinaryIO | None = None  # locked: no other server takes it for the rest of a crash
        self._is_kept = False

    async def __aenter__(self) -> "Upload":
        self._files.uploads[self._owner] += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._files.uploads[self._owner] -= 1
        if not self._is_kept:
            self._files.quota.release(self._num_bytes)
            await asyncio.shield(self._disk.run(self._discard))

    async def receive(self, headers: Headers, pieces: AsyncIterator[bytes]) -> UploadForm:
        """Write the file in a request's body to a draft, and return its form. Raises `ApiError`."""
        declared = headers.get("content-length", "")
        # Cut to 20 digits, because `int` raises ValueError beyond 4,300.
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes + FORM_BYTES:
            raise self._too_large()
        form = UploadForm(headers.get("content-type", ""))
        num_form_bytes = 0
        async for piece in _with_deadline(pieces):
            content = form.feed(piece)
            num_form_bytes += len(piece) - len(content)
            if num_form_bytes > FORM_BYTES:
                raise self._too_large()
            await self._buffer_content(content)
        if not form.is_complete:
            raise invalid_value(
                "The request's body ends before its form is complete.", None, code="invalid_multipart"
            )
        await self._write()
        return form

    async def keep(self, form: UploadForm, now: float) -> StoredFile:
        """Add the received file to the store. Raises `ApiError` for missing or invalid fields of the form."""
        if form.filename is None:
            raise invalid_value(
                "Missing required parameter: 'file'.", "file", code="missing_required_parameter"
            )
        purpose = _purpose(form)
        lifetime = _lifetime(form)
        file = StoredFile(
            id=self._id,
            owner=self._owner,
            filename=_filename(form),
            purpose=purpose,
            num_bytes=self._num_bytes,
            created_at=now,
            expires_at=now + lifetime,
        )
        # From here on a cancelled request keeps its file: the shield lets the move to the store complete.
        self._is_kept = True
        await asyncio.shield(self._keep(file))
        return file

    async def _keep(self, file: StoredFile) -> None:
        try:
            await self._disk.run(self._sync)
            await self._files.keep(file, self._path)
        finally:
            self._files.quota.release(self._num_bytes)
            # Until here the lock keeps other servers from removing the draft. A kept file has left its path.
            await self._disk.run(self._discard)

    async def _buffer_content(self, content: bytes) -> None:
        if self._num_bytes + len(content) > self._max_bytes:
            raise self._too_large()
        self._files.quota.take(len(content))
        self._num_bytes += len(content)
        self._buffer += content
        if len(self._buffer) >= PIECE_BYTES:
            await self._write()

    async def _write(self) -> None:
        piece = bytes(self._buffer)
        self._buffer.clear()
        if self._draft is None:
            self._draft = await self._disk.change(self._open)
        await self._disk.run(self._append, self._draft, piece)

    def _open(self) -> BinaryIO:
        descriptor = try_lock(self._path)
        assert descriptor is not None, "only this upload knows the id"
        return open(descriptor, "wb", buffering=0)

    def _append(self, draft: BinaryIO, piece: bytes) -> None:
        while piece:  # an unbuffered write may be short
            piece = piece[draft.write(piece) :]

    def _sync(self) -> None:
        assert self._draft is not None, "the form was received"
        os.fsync(self._draft.fileno())

    def _discard(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._draft is not None:
            self._draft.close()

    def _too_large(self) -> ApiError:
        return ApiError(
            413, "request_too_large", f"A file may have at most {self._max_bytes} bytes.", param="file"
        )


async def _with_deadline(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces while they arrive fast enough. Raises `ApiError` when they do not.

    Only the time spent waiting for the sender counts, not the time of the writes between two pieces.
    """
    now = asyncio.get_running_loop().time
    remaining = MAX_WAIT
    while True:
        start = now()
        try:
            async with asyncio.timeout(remaining):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            message = (
                f"The request's body arrived too slowly. The limit is {MAX_WAIT:g} seconds "
                f"and one more for each {MIN_RATE} bytes."
            )
            raise ApiError(408, "request_timeout", message) from error
        if piece is None:
            return
        remaining += len(piece) / MIN_RATE - (now() - start)
        yield piece


def _filename(form: UploadForm) -> str:
    name = form.filename or "upload"
    if len(name) > MAX_FILENAME:
        raise invalid_value(
            f"The file's name must have at most {MAX_FILENAME} characters, got {len(name)}.", "file"
        )
    return name


def _purpose(form: UploadForm) -> Purpose:
    if "purpose" not in form.fields:
        raise invalid_value(
            "Missing required parameter: 'purpose'.", "purpose", code="missing_required_parameter"
        )
    if form.fields["purpose"] != Purpose.BATCH.value.encode():
        purpose = _shown(form.fields["purpose"])
        raise invalid_value(f"'purpose' must be 'batch', got {purpose}.", "purpose")
    return Purpose.BATCH


def _lifetime(form: UploadForm) -> int:
    """Return the file's lifetime in seconds."""
    anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_LIFETIME
    if anchor != b"created_at":
        message = f"'expires_after[anchor]' must be 'created_at', got {_shown(anchor)}."
        raise invalid_value(message, "expires_after[anchor]")
    lifetime = int(seconds) if seconds is not None and seconds.isdigit() and len(seconds) < 10 else 0
    if not MIN_LIFETIME <= lifetime <= MAX_LIFETIME:
        raise invalid_value(
            f"'expires_after[seconds]' must be from {MIN_LIFETIME} to {MAX_LIFETIME}, got {_shown(seconds)}.",
            "expires_after[seconds]",
        )
    return lifetime


def _shown(value: bytes | None) -> str:
    """Return a field's value for an error message."""
    return "no value" if value is None else repr(value[:32].decode(errors="replace"))
