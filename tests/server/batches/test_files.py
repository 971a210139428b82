"""`/v1/files` by the real SDK, and by clients that mean no good."""

import errno
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import FileDeleted, FileObject

from server.batches.service import Batches
from server.batches.upload import Upload
from server.http.errors import ApiError
from server.text.renderer import Renderer
from tests.server.batches.conftest import KEYS
from tests.server.batches.inputs import Clock, batches_in, client
from tests.server.serving import RunningServer, serve

HOUR = 3600
CONTENT = bytes(range(256)) * 5000  # over a megabyte: more than one piece


def upload(sdk: openai.OpenAI, content: bytes = b"x", name: str = "a.jsonl", **options: Any) -> FileObject:
    raw = sdk.files.with_raw_response.create(**{"file": (name, content), "purpose": "batch"} | options)
    return FileObject.model_validate_json(raw.content, strict=True)


def test_an_uploaded_file_can_be_read_and_deleted(sdk: openai.OpenAI) -> None:
    file = upload(sdk, CONTENT, "mine.jsonl")
    assert file.id.startswith("file-")
    assert (file.object, file.bytes, file.filename, file.purpose, file.status) == (
        "file",
        len(CONTENT),
        "mine.jsonl",
        "batch",
        "processed",
    )
    assert file.expires_at == file.created_at + 30 * 24 * HOUR
    assert sdk.files.retrieve(file.id) == file
    assert sdk.files.wait_for_processing(file.id) == file
    assert sdk.files.content(file.id).read() == CONTENT
    raw = sdk.files.with_raw_response.delete(file.id)
    assert FileDeleted.model_validate_json(raw.content, strict=True).deleted
    for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError) as gone:
            call(file.id)
        assert gone.value.code == "file_not_found"


def test_an_empty_file_is_a_file(sdk: openai.OpenAI) -> None:
    file = upload(sdk, b"")
    assert file.bytes == 0
    assert sdk.files.content(file.id).read() == b""


async def test_the_asynchronous_client(keeping: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{keeping.url}/v1", api_key=KEYS[1], max_retries=0) as sdk:
        file = await sdk.files.create(file=("a", CONTENT), purpose="batch")
        assert (await sdk.files.content(file.id)).read() == CONTENT
        assert file.id in [each.id async for each in sdk.files.list()]
        assert (await sdk.files.delete(file.id)).deleted


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", "..\\..\\x", "a\x00b", "x" * 255, "%2e%2e%2fx", ".."]
)
def test_a_name_is_text_and_no_path(
    sdk: openai.OpenAI, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp()
    before = {path for path in root.rglob("*") if path.parent.name != "files"}
    file = upload(sdk, b"here", name)
    assert sdk.files.retrieve(file.id).filename == file.filename
    assert sdk.files.content(file.id).read() == b"here"
    assert {path for path in root.rglob("*") if path.parent.name != "files"} == before


@pytest.mark.parametrize(
    "file_id", ["..", "%2e%2e%2flock", "file-" + "0" * 32, "../lock", "file-x/../../lock", "file-\x00"]
)
def test_an_id_is_no_path(keeping: RunningServer, file_id: str) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    for method, path in (
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
    ):
        assert httpx.request(
            method, keeping.url + path.replace("\x00", "%00"), headers=headers
        ).status_code in (404, 405)


def test_pages(client_of: Callable[[str], openai.OpenAI]) -> None:
    sdk = client_of(KEYS[2])
    ids = [upload(sdk).id for _ in range(5)]
    assert [file.id for file in sdk.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in sdk.files.list(limit=2, order="asc")] == ids
    first = sdk.files.list(limit=3, order="asc")
    assert (first.has_more, [file.id for file in first.data]) == (True, ids[:3])
    rest = sdk.files.list(limit=3, order="asc", after=ids[2])
    assert (rest.has_more, [file.id for file in rest.data]) == (False, ids[3:])
    assert [file.id for file in sdk.files.list(purpose="batch")] == ids[::-1]
    assert sdk.files.list(purpose="batch_output").data == []


@pytest.mark.parametrize(
    "query",
    [{"limit": 0}, {"limit": 10_001}, {"limit": "x"}, {"limit": "٣"}, {"order": "up"}, {"after": "file-x"}],
)
def test_a_wrong_query_names_its_parameter(sdk: openai.OpenAI, query: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.files.list(**query)
    assert [refused.value.param] == list(query)


def test_a_key_sees_nothing_of_anothers(client_of: Callable[[str], openai.OpenAI]) -> None:
    mine, other = client_of(KEYS[0]), client_of(KEYS[1])
    file = upload(mine, b"secret")
    assert file.id not in [each.id for each in other.files.list()]
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.BadRequestError):
        other.files.list(after=file.id)
    assert mine.files.content(file.id).read() == b"secret"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"extra_body": {"more": "x"}}, "more"),
        ({"expires_after": {"anchor": "created_at", "seconds": 3599}}, "expires_after[seconds]"),
        ({"expires_after": {"anchor": "created_at", "seconds": 2592001}}, "expires_after[seconds]"),
        ({"expires_after": {"anchor": "last_used", "seconds": 3600}}, "expires_after[anchor]"),
        ({"file": ("x" * 256, b"")}, "file"),
    ],
)
def test_a_refusal_names_its_parameter(sdk: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    before = len(list(sdk.files.list()))
    with pytest.raises(openai.BadRequestError) as refused:
        upload(sdk, **options)
    assert refused.value.param == param
    assert len(list(sdk.files.list())) == before


def test_a_form_from_another_sites_page_is_refused(keeping: RunningServer) -> None:
    files, data = {"file": ("a", b"x")}, {"purpose": "batch"}
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        headers = {"Authorization": f"Bearer {KEYS[0]}", "Sec-Fetch-Site": site}
        assert (
            httpx.post(f"{keeping.url}/v1/files", files=files, data=data, headers=headers).status_code
            == status
        )


def test_an_upload_needs_a_key(keeping: RunningServer) -> None:
    assert httpx.post(f"{keeping.url}/v1/files", files={"file": ("a", b"x")}).status_code == 401


def test_a_json_body_is_no_upload(keeping: RunningServer) -> None:
    answer = httpx.post(f"{keeping.url}/v1/files", json={}, headers={"Authorization": f"Bearer {KEYS[0]}"})
    assert answer.status_code == 400


class Keeping:
    """A server with small limits, where its files lie, and its clock."""

    def __init__(self, server: RunningServer, batches: Batches, clock: Clock) -> None:
        self.server, self.batches, self.clock = server, batches, clock
        self.sdk = client(server)

    @property
    def kept(self) -> list[Path]:
        return sorted((self.batches.disk.root / "files").iterdir())


@pytest.fixture
def small(renderer: Renderer, tmp_path: Path) -> Iterator[Keeping]:
    clock = Clock()
    limits = {"max_file_size": 1000, "max_files": 4, "max_uploads": 2, "max_file_storage": 2500}
    with batches_in(tmp_path, clock.now, **limits) as batches, serve(renderer, batches=batches) as server:
        keeping = Keeping(server, batches, clock)
        yield keeping
        keeping.sdk.close()


def test_a_file_above_the_limit_is_refused(small: Keeping) -> None:
    assert upload(small.sdk, b"x" * 1000).bytes == 1000
    with pytest.raises(openai.APIStatusError) as refused:
        upload(small.sdk, b"x" * 1001)
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
    assert len(small.kept) == 2


@pytest.mark.parametrize(
    ("part", "status"),
    [
        ('name="file"; filename="a"', 413),
        ('name="purpose"', 400),
        ('name="file"; filename="' + "y" * 3000 + '"', 400),
    ],
)
def test_a_body_without_an_end_is_refused_before_it_fills_anything(
    small: Keeping, part: str, status: int
) -> None:
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    port = int(small.server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head.encode())
        piece = f"--b\r\nContent-Disposition: form-data; {part}\r\n\r\n".encode()
        num_sent = 0
        while not select.select([connection], [], [], 0)[0]:  # until there is an answer
            connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            num_sent += len(piece)
            piece = b"x" * 4096
        assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())
    assert num_sent < 50_000_000
    small.server.observed.wait_until(lambda: small.server.observed.statuses == [status])
    assert small.kept == []
    assert small.batches.files.quota.num_used == 0


def test_files_above_the_total_limit_are_refused(small: Keeping) -> None:
    for _ in range(2):
        upload(small.sdk, b"x" * 1000)
    with pytest.raises(openai.APIStatusError) as refused:
        upload(small.sdk, b"x" * 501)
    assert (refused.value.status_code, refused.value.code) == (413, "storage_limit_exceeded")
    assert len(small.kept) == 4
    upload(small.sdk, b"x" * 500)
    small.sdk.files.delete(small.sdk.files.list().data[0].id)
    upload(small.sdk, b"x" * 500)


def test_the_number_of_files_is_limited(small: Keeping) -> None:
    for _ in range(4):
        upload(small.sdk)
    with pytest.raises(openai.APIStatusError) as refused:
        upload(small.sdk)
    assert (refused.value.status_code, refused.value.code) == (413, "file_limit_exceeded")


def test_an_expired_file_is_deleted(small: Keeping) -> None:
    file = upload(small.sdk, expires_after={"anchor": "created_at", "seconds": HOUR})
    assert file.expires_at == small.clock.time + HOUR
    small.clock.time += HOUR - 1
    assert small.sdk.files.retrieve(file.id) == file
    small.clock.time += 1
    with pytest.raises(openai.NotFoundError):
        small.sdk.files.content(file.id)
    assert small.sdk.files.list().data == []


def half_an_upload(small: Keeping) -> socket.socket:
    """Return a connection on which an upload has begun."""
    connection = socket.create_connection(("127.0.0.1", int(small.server.url.rpartition(":")[2])), timeout=30)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        "Content-Length: 900\r\n\r\n"
    )
    connection.sendall(head.encode() + b"--b\r\n")
    return connection


def test_an_aborted_upload_leaves_no_file(small: Keeping) -> None:
    with half_an_upload(small) as connection:
        connection.sendall(b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 500)
    small.server.observed.wait_until(lambda: len(small.server.observed.statuses) == 1)
    assert small.kept == []
    assert (small.batches.files.quota.num_used, small.batches.files.uploads.total()) == (0, 0)


def test_concurrent_uploads_are_limited(small: Keeping) -> None:
    small.batches.files.uploads["other"] = small.batches.limits.max_uploads  # whose senders take their time
    with pytest.raises(openai.RateLimitError):
        upload(small.sdk)
    small.batches.files.uploads.clear()
    upload(small.sdk)


def test_one_key_has_half_of_the_uploads(small: Keeping) -> None:
    files, most = small.batches.files, small.batches.limits.max_uploads
    files.uploads["one"] = (most + 1) // 2
    with pytest.raises(ApiError, match="from one key") as refusal:
        files.check_room("one")
    assert refusal.value.status == 429
    files.check_room("another")
    files.uploads.clear()


def test_an_upload_may_not_be_slow(small: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batches.upload.MAX_WAIT", 0)
    with half_an_upload(small) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
    assert small.kept == []


def test_a_form_that_breaks_off_is_no_file(small: Keeping) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf of it'
    answer = httpx.post(
        f"{small.server.url}/v1/files",
        content=body,
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_multipart")
    assert small.kept == []


def test_files_survive_a_restart_and_are_private(renderer: Renderer, tmp_path: Path) -> None:
    with (
        batches_in(tmp_path) as batches,
        serve(renderer, batches=batches) as server,
        client(server) as sdk,
    ):
        file = upload(sdk, CONTENT)
    for path in (tmp_path / "kept").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    (tmp_path / "kept" / "files" / "file-lost.draft").write_bytes(b"of an upload that a crash broke off")
    with (
        batches_in(tmp_path) as batches,
        serve(renderer, batches=batches) as server,
        client(server) as sdk,
    ):
        assert sdk.files.list().data == [file]
        assert sdk.files.content(file.id).read() == CONTENT
    assert not (tmp_path / "kept" / "files" / "file-lost.draft").exists()


def test_a_full_disk_is_a_507_and_leaves_nothing(
    small: Keeping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Upload, "_append", fail)
        file = ("a.jsonl", b"x" * 100)
        answer = httpx.post(f"{small.server.url}/v1/files", data={"purpose": "batch"}, files={"file": file})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
    assert [record for record in caplog.records if record.exc_info] == []
    with client(small.server) as sdk:
        assert upload(sdk, b"x").bytes == 1


def test_without_a_folder_batches_are_not_served(running: RunningServer) -> None:
    for method, path in (
        ("GET", "/v1/files"),
        ("GET", "/v1/files/x"),
        ("DELETE", "/v1/files/x"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches"),
    ):
        answer = httpx.request(method, running.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batches_disabled")
        assert "--batch-dir" in answer.json()["error"]["message"]
