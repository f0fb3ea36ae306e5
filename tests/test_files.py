# SPDX-License-Identifier: Apache-2.0
"""Files and folders have the old or the whole new content, whatever happens in between."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

from sparse_bitnet import files
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder, remove_leftovers, write_atomic


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it."""


FULL = OSError(errno.ENOSPC, "No space left on device")


class TestWriteAtomic:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        path = tmp_path / "file"
        path.write_text("old")
        return path

    @pytest.mark.parametrize("data", [b"\x00\xff", "grüße\n"])
    def test_writes_bytes_or_text_and_replaces(self, old: Path, data: bytes | str) -> None:
        write_atomic(old, data)
        assert old.read_bytes() == (data if isinstance(data, bytes) else data.encode())
        assert os.listdir(old.parent) == ["file"]

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_full_disk_is_one_line_and_keeps_the_old(
        self, old: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        monkeypatch.setattr(os, call, Mock(side_effect=FULL))
        with pytest.raises(UserError, match=r"cannot write .*file: No space left on device"):
            write_atomic(old, "new")
        assert old.read_text() == "old"
        assert os.listdir(old.parent) == ["file"]

    def test_killed_half_way_keeps_the_old(self, old: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(os, "replace", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            write_atomic(old, "new")
        assert old.read_text() == "old"
        monkeypatch.undo()
        remove_leftovers(old.parent)
        assert os.listdir(old.parent) == ["file"]

    @pytest.mark.parametrize("name", ["file/x", "a" * 250, "."])
    def test_an_impossible_file_name_is_one_line(
        self, old: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(old.parent)
        with pytest.raises(UserError, match="cannot write"):
            write_atomic(name, "new")
        assert os.listdir(old.parent) == ["file"]


class TestAtomicFolder:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        path = tmp_path / "folder"
        path.mkdir()
        (path / "old").write_text("old")
        return path

    def test_folder_appears_whole_with_its_parents(self, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b"
        with atomic_folder(path) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_text("new")
            assert not path.exists()
        assert (path / "sub" / "file").read_text() == "new"
        assert os.listdir(path.parent) == ["b"]

    def test_replaces_the_whole_folder(self, old: Path) -> None:
        with atomic_folder(old) as folder:
            (folder / "new").write_text("new")
            assert os.listdir(old) == ["old"]
        assert os.listdir(old) == ["new"]
        assert os.listdir(old.parent) == ["folder"]

    def test_failing_second_rename_puts_the_old_back(
        self, old: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename, calls = os.rename, []

        def second_fails(source: Path, target: Path) -> None:
            calls.append(source)
            if len(calls) == 2:
                raise FULL
            rename(source, target)

        monkeypatch.setattr(os, "rename", second_fails)
        with pytest.raises(UserError), atomic_folder(old):
            pass
        assert os.listdir(old) == ["old"]

    def test_a_link_stays_and_its_folder_is_replaced(self, old: Path) -> None:
        link = old.with_name("link")
        link.symlink_to("folder")
        with atomic_folder(link) as folder:
            (folder / "new").write_text("new")
        assert link.is_symlink()
        assert os.listdir(old) == ["new"]
        assert sorted(os.listdir(old.parent)) == ["folder", "link"]

    def test_one_folder_is_not_written_twice_at_once(self, old: Path) -> None:
        with atomic_folder(old) as folder:
            (folder / "new").touch()
            with (
                pytest.raises(UserError, match=r"cannot write .*: File exists"),
                atomic_folder(old),
            ):
                pass
        assert os.listdir(old) == ["new"]
        (old.parent / f".tmp-{os.getpid()}-{old.name}").mkdir()  # of another container's process
        with atomic_folder(old):
            pass

    @pytest.mark.parametrize(
        "error",
        [FULL, SafetensorError("Error while serializing: I/O error: full (os error 28)")],
    )
    def test_full_disk_is_one_line_and_keeps_the_old(self, old: Path, error: Exception) -> None:
        with pytest.raises(UserError, match=r"cannot write .*folder: No space left on device$"):
            with atomic_folder(old):
                raise error
        assert os.listdir(old) == ["old"]
        assert os.listdir(old.parent) == ["folder"]

    @pytest.mark.parametrize("surviving", [0, 2])
    def test_killed_at_a_rename_old_or_new_survives(
        self, old: Path, monkeypatch: pytest.MonkeyPatch, surviving: int
    ) -> None:
        """SIGKILL before the first rename, and before the old folder is removed."""
        rename, calls = os.rename, []

        def rename_then_die(source: Path, target: Path) -> None:
            calls.append(source)
            if len(calls) > surviving:
                raise Killed
            rename(source, target)

        monkeypatch.setattr(os, "rename", rename_then_die)
        monkeypatch.setattr(files.shutil, "rmtree", Mock(side_effect=Killed))
        with pytest.raises(Killed), atomic_folder(old) as folder:
            (folder / "new").write_text("new")
        monkeypatch.undo()
        remove_leftovers(old.parent)
        assert os.listdir(old) == (["new"] if surviving == 2 else ["old"])
        assert os.listdir(old.parent) == ["folder"]

    @pytest.mark.parametrize("name", ["file", ".", ".."])
    def test_a_file_in_the_place_of_a_folder_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        (tmp_path / "file").write_text("mine")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match="not a name for a new folder"):
            with atomic_folder(name):
                pass
        assert (tmp_path / "file").read_text() == "mine"


def test_leftovers_go_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / ".tmp-1-file").write_text("half")
    (tmp_path / ".tmp-2-folder").mkdir()
    (tmp_path / ".tmp-2-replaced-3-name").write_text("half")
    (tmp_path / "kept").write_text("whole")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["kept"]
