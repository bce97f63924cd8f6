"""Downloads: resumed, checked, and whole or not there."""

import contextlib
import functools
import http.server
import os
import threading
from typing import ClassVar

import pytest

from econv import data
from econv.data import DataError
from full_disk import full_disk
from small_data import md5
from terminals import use_terminal


class Plain(http.server.SimpleHTTPRequestHandler):
    """No partial answers."""

    asked: ClassVar[list[str | None]] = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        type(self).asked.append(self.headers.get("Range"))
        super().do_GET()


class Resuming(Plain):
    """Answers requests for the end of a file; breaks off after `limit` bytes where it is set."""

    limit: int | None = None

    def do_GET(self):
        asked = self.headers.get("Range")
        type(self).asked.append(asked)
        path = self.translate_path(self.path)
        if not os.path.isfile(path):
            return self.send_error(404)
        with open(path, "rb") as stream:
            content = stream.read()
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return None
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.limit])
        return None


@pytest.fixture
def serve():
    """Serve a folder over HTTP as a chosen handler does; gives the address."""
    with contextlib.ExitStack() as stack:

        def start(folder, handler=None):
            make = functools.partial(handler or Resuming, directory=str(folder))
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/"

        yield start


def handler(base, **attributes):
    """A handler class of its own, with its own list of requests."""
    return type("Handler", (base,), {"asked": [], **attributes})


def test_an_interrupted_download_is_resumed(publish, serve, tmp_path):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    name = published.files[0].name
    content = (published.folder / name).read_bytes()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{name}.part").write_bytes(content[:1000])
    published.check(data.load("cifar10"))
    assert resuming.asked == ["bytes=1000-"]
    assert (tmp_path / "cache" / name).read_bytes() == content


def test_a_connection_that_breaks_is_taken_up_again(publish, serve):
    published = publish("cifar10")
    size = (published.folder / published.files[0].name).stat().st_size
    breaking = handler(Resuming, limit=size // 2 + 10)
    published.at(serve(published.folder, breaking))
    published.check(data.load("cifar10"))
    assert breaking.asked == [None, f"bytes={size // 2 + 10}-"]


def test_a_connection_that_keeps_breaking_is_given_up_and_kept(publish, serve, tmp_path):
    published = publish("cifar10")
    published.at(serve(published.folder, handler(Resuming, limit=100)))
    with pytest.raises(DataError, match=r"the connection ended after 300 of \d+ bytes"):
        data.load("cifar10")
    (part,) = (tmp_path / "cache").glob("*.part")
    assert part.stat().st_size == 300
    assert not (tmp_path / "cache" / published.files[0].name).exists()


def test_a_full_disk_is_named_and_what_came_is_kept(publish, serve, tmp_path, monkeypatch):
    published = publish("cifar10")
    published.at(serve(published.folder, handler(Resuming)))
    name = published.files[0].name
    with monkeypatch.context() as patch:
        full_disk(patch, name, tmp_path)
        with pytest.raises(DataError, match=f"/{name}: could not be .*No space left on device"):
            data.load("cifar10")
    assert (tmp_path / "cache" / f"{name}.part").stat().st_size > 0
    assert not (tmp_path / "cache" / name).exists()
    published.check(data.load("cifar10"))


def test_a_server_that_cannot_resume_starts_anew(publish, serve, tmp_path):
    published = publish("cifar10")
    plain = handler(Plain)
    published.at(serve(published.folder, plain))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{published.files[0].name}.part").write_bytes(b"something")
    published.check(data.load("cifar10"))
    assert plain.asked == ["bytes=9-"]


def test_a_wrong_beginning_is_thrown_away(publish, serve, tmp_path):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{published.files[0].name}.part").write_bytes(b"something")
    published.check(data.load("cifar10"))
    assert resuming.asked == ["bytes=9-", None]


@pytest.mark.parametrize("extra", [b"", b"more than there is"])
def test_a_whole_or_longer_beginning_is_settled(publish, serve, tmp_path, extra):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    name = published.files[0].name
    content = (published.folder / name).read_bytes()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{name}.part").write_bytes(content + extra)
    published.check(data.load("cifar10"))
    assert resuming.asked == [f"bytes={len(content + extra)}-", *([None] if extra else [])]


def test_a_wrong_file_is_never_kept(publish, serve, tmp_path):
    published = publish("cifar10")
    name = published.files[0].name
    (published.folder / name).write_bytes(b"another file")
    plain = handler(Plain)
    published.at(serve(published.folder, plain))
    with pytest.raises(DataError, match=f"MD5 {md5(b'another file')} instead of .* as source"):
        data.load("cifar10")
    assert plain.asked == [None]
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_next_address_is_tried(publish, serve, tmp_path):
    published = publish("cifar10")
    (tmp_path / "empty").mkdir()
    published.at(serve(tmp_path / "empty"), "http://127.0.0.1:1/", serve(published.folder))
    published.check(data.load("cifar10"))


def test_without_a_network_it_says_what_to_do(publish, tmp_path):
    published = publish("mnist_rot")
    published.at("http://127.0.0.1:1/")
    with pytest.raises(DataError, match=r"could not be downloaded .*refused.* name its folder"):
        data.load("mnist_rot")
    with pytest.raises(DataError, match=r"missing: mnist_rotation_new.zip.*http://127.0.0.1:1/"):
        data.load("mnist_rot", download=False)


def test_a_named_folder_is_never_written_to(publish, tmp_path):
    publish("cifar10")
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="missing"):
        data.load("cifar10", source=tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir())


def test_a_root_that_cannot_be_written_is_named(publish, tmp_path):
    publish("cifar10")
    (tmp_path / "blocked").write_bytes(b"")
    with pytest.raises(DataError, match=r"blocked.*cannot be written .*ECONV_DATA"):
        data.load("cifar10", root=tmp_path / "blocked" / "below")


def test_processes_that_load_together_download_once(publish, serve):
    published = publish("cifar10")
    resuming = handler(Resuming)
    published.at(serve(published.folder, resuming))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(data.load("cifar10"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert resuming.asked == [None]


def test_progress_is_drawn_on_a_terminal(publish, monkeypatch):
    published = publish("cifar10")
    terminal = use_terminal(monkeypatch)
    published.check(data.load("cifar10"))
    assert published.files[0].name in terminal.getvalue()
    assert "━" in terminal.getvalue()


def test_where_mnist_rot_cannot_be_had_its_re_creation_is_mentioned(tmp_path, monkeypatch):
    def fails(file, folder):
        raise DataError(f"{file.name}: could not be downloaded")

    monkeypatch.setattr("econv.data.official.fetched", fails)
    with pytest.raises(DataError, match=r"could not be downloaded.*--recreated"):
        data.load("mnist_rot", root=tmp_path)
    with pytest.raises(DataError) as caught:
        data.load("cifar10", root=tmp_path)
    assert "recreated" not in str(caught.value)
    with pytest.raises(DataError, match=r"missing.*--recreated"):
        data.load("mnist_rot", root=tmp_path, download=False)
