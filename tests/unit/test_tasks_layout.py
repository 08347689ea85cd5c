"""What a repository is sorted into, and tests cut from their files."""

import io
import tarfile
from pathlib import Path

import pytest

from support.tiny_package import FILES, TESTS, tiny_layout
from tidemill.core.errors import TaskError, UsageError
from tidemill.tasks.layout import cut_tests, layout, module_name
from tidemill.tasks.packages import PackagePin, cache_folder, parse_requirement, read_archive, read_repository


def test_source_tests_and_the_rest() -> None:
    found = tiny_layout()
    assert sorted(found.sources) == ["src/tiny/__init__.py", "src/tiny/words.py"]
    assert sorted(found.tests) == ["tests/test_words.py"]
    assert module_name("src/tiny/words.py") == "tiny.words"


def test_only_the_wanted_tests_stay() -> None:
    text = cut_tests(TESTS, ["tests/test_words.py::test_clamp[0-1]", "tests/test_words.py::TestInitials::test_two"])
    assert "def test_clamp(value" in text and "@pytest.mark.parametrize" in text
    assert "def test_two" in text and "def test_other" not in text
    assert "test_clamp_inside" not in text and "test_plus" not in text
    compile(text, "test_words.py", "exec")


def test_a_base_class_keeps_what_its_heirs_run() -> None:
    source = "class Base:\n    def test_a(self): pass\n    def test_b(self): pass\nclass TestX(Base):\n    x = 1\n"
    text = cut_tests(source, ["t.py::TestX::test_a"])
    assert "test_a" in text and "test_b" not in text and "class TestX(Base)" in text


@pytest.mark.parametrize(
    "files, message",
    [
        ({"README": b""}, "no importable package"),
        ({"a/__init__.py": b"def f(): pass\n"}, "has no tests"),
        (FILES | {"src/tiny/bad.py": b"def f(:\n"}, "src/tiny/bad.py cannot be parsed"),
        (FILES | {"src/tiny/bad.py": b"'\xff'"}, "not UTF-8"),
    ],
)
def test_unusable_repositories_are_told_in_one_line(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        layout(files, "tiny")
    assert "\n" not in str(caught.value)


def archive(path: Path, *members: tuple[str, bytes, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = len(data)
            info.linkname = "/etc/passwd"
            tar.addfile(info, io.BytesIO(data))
    return path


def test_links_are_left_out_and_paths_that_lead_out_are_refused(tmp_path: Path) -> None:
    good = archive(tmp_path / "a.tar.gz", ("a-1/x.py", tarfile.REGTYPE, b"1"), ("a-1/y.py", tarfile.SYMTYPE, b""))
    assert read_archive(good) == {"x.py": b"1"}
    for name in ("../x.py", "/x.py", "a-1/../../x.py"):
        with pytest.raises(TaskError, match="leads out of it"):
            read_archive(archive(tmp_path / "b.tar.gz", (name, tarfile.REGTYPE, b"1")))
    (tmp_path / "c.tar.gz").write_bytes(b"no archive")
    with pytest.raises(TaskError, match="cannot be read"):
        read_archive(tmp_path / "c.tar.gz")


def test_a_repository_is_read_without_its_history(tmp_path: Path) -> None:
    for path in ("pkg/__init__.py", ".git/config", "pkg/__pycache__/x.pyc", "env/pyvenv.cfg", "env/lib.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1")
    (tmp_path / "link.py").symlink_to("/etc/passwd")
    assert sorted(read_repository(tmp_path)) == ["pkg/__init__.py"]
    with pytest.raises(UsageError, match="no folder"):
        read_repository(tmp_path / "absent")


def test_a_requirement_is_a_name_and_a_version() -> None:
    pin = parse_requirement("more-itertools==11.2.1")
    assert isinstance(pin, PackagePin) and (pin.name, pin.version) == ("more-itertools", "11.2.1")
    assert parse_requirement("./repo") is None and parse_requirement("a==--index-url") is None


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="can be written by others"):
        cache_folder()
