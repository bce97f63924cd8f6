"""Files that are whole or not there, and on the disk before they take their place."""

import os

import pytest

from econv import files


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the system, in its order, with the names of the files."""
    found = []
    fsync, replace = os.fsync, os.replace

    def name(handle):
        return os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))

    def watched_fsync(handle):
        found.append(("fsync", name(handle)))
        fsync(handle)

    def watched_replace(before, after):
        found.append(("replace", os.path.basename(after)))
        replace(before, after)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc to name open files")
def test_content_is_on_the_disk_before_its_name_and_the_name_before_it_returns(tmp_path, calls):
    """After a loss of power there is the old file or the new one, and no empty one."""
    files.write_atomically(tmp_path / "record.json", b"{}")
    temporary = f".{os.getpid()}.record.json"
    assert calls == [("fsync", temporary), ("replace", "record.json"), ("fsync", tmp_path.name)]
    assert (tmp_path / "record.json").read_bytes() == b"{}"


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "record.json"
    files.write_atomically(path, b"old")

    def fail():
        with files.atomic(path) as temporary:
            temporary.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record.json"]


def test_what_killed_processes_left_is_removed_once_it_is_old(tmp_path):
    dead = 2**22 + 1  # above what the system counts to
    left, young, own = (tmp_path / f".{number}.x" for number in (dead, dead + 1, os.getpid()))
    for path in (left, young, own):
        path.write_bytes(b"half")
    os.utime(left, (0, 0))
    os.utime(own, (0, 0))
    (tmp_path / ".hidden").write_bytes(b"")
    files.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([young.name, own.name, ".hidden"])
