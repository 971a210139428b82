"""`/v1/files`: uploads, lists, contents and deletions. Each API key has access to its own files only."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from server.batches.files import StoredFile, no_such_file
from server.batches.service import enabled, up_to_date
from server.batches.upload import Upload
from server.http.pages import page
from server.http.record import RequestRecord
from server.protocol.files import UPLOAD, FileDeleted, FileList, FileObject
from server.services import Services

MAX_LISTED: Final = 10_000
PIECE_BYTES: Final = 256 * 1024


def router(services: Services) -> APIRouter:
    routes = APIRouter()
    batches = services.batches

    @routes.post("/v1/files", response_model=FileObject, openapi_extra=UPLOAD)
    async def create_file(request: Request) -> FileObject | Response:
        service = enabled(batches)
        try:
            owner = RequestRecord.of(request.scope).tenant
            async with Upload(service.disk, service.files, service.options.max_file_size, owner) as upload:
                form = await upload.receive(request.headers, request.stream())
                return _file_object(await upload.keep(form, service.now()))
        except ClientDisconnect:
            # The client is gone: this response reaches the access log and the metrics only.
            return Response(status_code=400)

    @routes.get("/v1/files")
    async def list_files(request: Request) -> FileList:
        purpose = request.query_params.get("purpose")
        files = [
            file
            for file in (await up_to_date(batches)).files.of(RequestRecord.of(request.scope).tenant)
            if purpose in (None, file.purpose)
        ]
        shown, has_more = page(request, files, default=MAX_LISTED, max_limit=MAX_LISTED)
        data = [_file_object(file) for file in shown]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else "",
            "last_id": data[-1]["id"] if data else "",
            "has_more": has_more,
        }

    @routes.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> FileObject:
        owner = RequestRecord.of(request.scope).tenant
        return _file_object((await up_to_date(batches)).files.get(file_id, owner))

    @routes.get("/v1/files/{file_id}/content", response_class=StreamingResponse)
    async def retrieve_content(request: Request, file_id: str) -> StreamingResponse:
        files = (await up_to_date(batches)).files
        file = files.get(file_id, RequestRecord.of(request.scope).tenant)
        try:
            content = await run_in_threadpool(_open, files.content_of(file.id))
        except FileNotFoundError as error:  # deleted after the lookup
            raise no_such_file(file_id) from error
        # The content is a client's: `nosniff` and the media type keep a browser from rendering it as HTML.
        headers = {"Content-Length": str(file.num_bytes), "X-Content-Type-Options": "nosniff"}
        return StreamingResponse(_pieces(content), media_type="application/octet-stream", headers=headers)

    @routes.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> FileDeleted:
        await enabled(batches).files.delete(file_id, RequestRecord.of(request.scope).tenant)
        return {"id": file_id, "object": "file", "deleted": True}

    return routes


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _pieces(content: BinaryIO) -> Iterator[bytes]:
    with content:
        while piece := content.read(PIECE_BYTES):
            yield piece


def _file_object(file: StoredFile) -> FileObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose.value,
        "status": "processed",
    }
