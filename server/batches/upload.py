"""An upload: from the pieces of a request's body to a file in the store. However large it is, memory holds one piece of it.

It is bounded in size, by the room on the disk, by how many there are at once, of one key and of all, and by how long its sender may be
waited for, so that slow ones do not keep others out.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Final

from starlette.datastructures import Headers

from server.batches.disk import Disk, private
from server.batches.files import DEFAULT_LIFETIME, FileStore, Purpose, StoredFile, new_file_id
from server.batches.multipart import UploadForm
from server.http.errors import ApiError, invalid_value
from server.protocol.files import MAX_LIFETIME, MIN_LIFETIME

FORM_BYTES: Final = 64 * 1024  # that a form's body may have beyond its file
MAX_WAIT: Final = 60.0  # seconds that a sender may be waited for in all, and a second more for each so many bytes that came:
MIN_RATE: Final = 32 * 1024
MAX_FILENAME: Final = 255  # characters
PIECE_BYTES: Final = 1024 * 1024  # that are gathered before they are written


class Upload:
    """One file on its way in. A context manager: what was not kept is removed at its end."""

    def __init__(self, disk: Disk, files: FileStore, max_bytes: int, owner: str) -> None:
        files.check_room(owner)
        self._disk, self._files, self._max_bytes, self._owner = disk, files, max_bytes, owner
        self._id = new_file_id()
        self._path = files.draft_path(self._id)
        self._num_bytes = 0
        self._waiting = bytearray()
        self._is_kept = False

    async def __aenter__(self) -> "Upload":
        self._files.uploads[self._owner] += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._files.uploads[self._owner] -= 1
        if not self._is_kept:
            self._files.quota.add(-self._num_bytes)
            await asyncio.shield(self._disk.run(lambda: self._path.unlink(missing_ok=True)))

    async def receive(self, headers: Headers, pieces: AsyncIterator[bytes]) -> UploadForm:
        """Write the file that comes with a request, and return the form around it. Raises `ApiError`."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes + FORM_BYTES:
            raise self._too_large()
        form = UploadForm(headers.get("content-type", ""))
        num_form_bytes = 0
        async for piece in _in_time(pieces):
            content = form.feed(piece)
            num_form_bytes += len(piece) - len(content)
            if num_form_bytes > FORM_BYTES:
                raise self._too_large()
            await self._take(content)
        if not form.is_complete:
            raise invalid_value(
                "The request's body ends before its form does.", None, code="invalid_multipart"
            )
        await self._write()
        return form

    async def keep(self, form: UploadForm, now: float) -> StoredFile:
        """Put what was received into the store. Raises `ApiError` for a form that is not complete or asks for what there is not."""
        if form.filename is None:
            raise invalid_value(
                "Missing required parameter: 'file'.", "file", code="missing_required_parameter"
            )
        purpose, lifetime = _purpose(form), _lifetime(form)
        file = StoredFile(
            self._id, self._owner, _filename(form), purpose, self._num_bytes, now, now + lifetime
        )
        self._is_kept = True
        await asyncio.shield(self._keep(file))
        return file

    async def _keep(self, file: StoredFile) -> None:
        await self._disk.run(self._sync)
        await self._files.keep(file, self._path)

    async def _take(self, content: bytes) -> None:
        if self._num_bytes + len(content) > self._max_bytes:
            raise self._too_large()
        self._files.quota.take(len(content))
        self._num_bytes += len(content)
        self._waiting += content
        if len(self._waiting) >= PIECE_BYTES:
            await self._write()

    async def _write(self) -> None:
        piece, self._waiting = bytes(self._waiting), bytearray()
        await self._disk.run(self._append, piece)

    def _append(self, piece: bytes) -> None:
        with open(self._path, "ab", opener=private) as file:
            file.write(piece)

    def _sync(self) -> None:
        with open(self._path, "ab", opener=private) as file:
            os.fsync(file.fileno())

    def _too_large(self) -> ApiError:
        return ApiError(
            413, "request_too_large", f"A file may have at most {self._max_bytes} bytes.", param="file"
        )


async def _in_time(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass the pieces on for as long as they come fast enough; the time that they take to be written is not the sender's."""
    now = asyncio.get_running_loop().time
    patience = MAX_WAIT
    while True:
        start = now()
        try:
            async with asyncio.timeout(patience):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            message = f"The request's body came too slowly: it has {MAX_WAIT:g} seconds, and one more for each {MIN_RATE} bytes."
            raise ApiError(408, "request_timeout", message) from error
        if piece is None:
            return
        patience += len(piece) / MIN_RATE - (now() - start)
        yield piece


def _filename(form: UploadForm) -> str:
    name = form.filename or "upload"
    if len(name) > MAX_FILENAME:
        raise invalid_value(
            f"The file's name has {len(name)} characters, at most {MAX_FILENAME} may be.", "file"
        )
    return name


def _purpose(form: UploadForm) -> Purpose:
    if "purpose" not in form.fields:
        raise invalid_value(
            "Missing required parameter: 'purpose'.", "purpose", code="missing_required_parameter"
        )
    if form.fields["purpose"] != Purpose.BATCH.value.encode():
        raise invalid_value(
            "Invalid value for 'purpose': this server takes files of purpose 'batch' only.", "purpose"
        )
    return Purpose.BATCH


def _lifetime(form: UploadForm) -> int:
    """Return the seconds for which a file is kept."""
    anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_LIFETIME
    if anchor != b"created_at":
        raise invalid_value("'expires_after[anchor]' must be 'created_at'.", "expires_after[anchor]")
    number = int(seconds) if seconds is not None and seconds.isdigit() and len(seconds) < 10 else 0
    if not MIN_LIFETIME <= number <= MAX_LIFETIME:
        raise invalid_value(
            f"'expires_after[seconds]' must be from {MIN_LIFETIME} to {MAX_LIFETIME}.",
            "expires_after[seconds]",
        )
    return number
