"""The page about a run: self-contained, escaped, and about the right things."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from support.synthetic_run import synthetic_run
from tidemill.core.errors import RunFolderError
from tidemill.core.records import Episode
from tidemill.reports.audit import audit
from tidemill.reports.page import render, write_report
from tidemill.reports.page_episodes import choose, corrected_itself, is_solved, spans_versions
from tidemill.reports.rundata import RunData

VOID = {"meta", "line", "rect", "circle", "polyline", "polygon", "br", "img"}


class Page(HTMLParser):
    """Checks that tags close in order, and gathers what a browser would load or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("page") / "run", num_updates=5, group_size=4)


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return write_report(run, run.parent / "out" / "report.html").read_text()


def test_it_is_one_file_that_asks_for_nothing(html: str) -> None:
    page = Page(html)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "video"} & page.tags.keys()
    assert not [pair for pair in page.attributes if pair[0] in ("src", "href", "srcset") or pair[0].startswith("on")]
    assert "url(" not in html
    assert "@import" not in html
    assert re.findall(r"https?://", html) == []


def test_what_the_policy_wrote_is_text_and_nothing_else(run: Path, html: str) -> None:
    """The synthetic policy writes a script into an edit and into its patch."""
    page = Page(html)
    assert any("<script>alert" in text for text in page.text), "the failed episode is not on the page"
    assert "script" not in page.tags
    assert "&lt;script&gt;" in html


def test_its_sections_and_figures(run: Path, html: str) -> None:
    text = " ".join(Page(html).text)
    for title in ("Learning", "Evaluation", "Accounting", "Outside audit", "The five services", "Five episodes"):
        assert title in text
    for service in ("coordinator-0", "worker-0", "engine-0", "learner-0", "evaluator-0"):
        assert service in text
    accepted = audit(run).line("accounting closes").figures["accepted"]
    assert f"{accepted:.0f} accepted" in text
    assert "16 of 16" in text
    assert "NaN" not in html


def test_the_five_episodes_are_what_they_are_called(run: Path) -> None:
    data = RunData(run)
    chosen = {title: (row, episode) for title, row, episode in choose(data)}
    assert list(chosen) == [
        "The first one solved",
        "Solved late in the run",
        "Corrected itself",
        "Failed",
        "Spans two versions of the policy",
    ]
    solved = [row for row in data.finished if (e := data.episode(row.episode)) is not None and is_solved(e)]
    assert chosen["The first one solved"][0].id == solved[0].id
    assert chosen["Solved late in the run"][0].id == solved[-1].id
    assert not is_solved(chosen["Failed"][1])
    assert corrected_itself(chosen["Corrected itself"][1])
    assert spans_versions(chosen["Spans two versions of the policy"][1])
    assert len({row.id for row, _ in chosen.values()}) == 5


def test_a_patch_is_a_diff_where_the_original_is_known(run: Path) -> None:
    asked: list[str] = []

    def originals(episode: Episode) -> dict[str, bytes]:
        asked.append(episode.attempt_id)
        return {path: b"def before():\n    return 1\n" for path in episode.patch}

    text = "".join(Page(render(RunData(run), audit(run, num_parity=1), originals)).text)
    assert asked
    assert "-def before():" in text
    assert "+++ b/" in text


def test_a_run_that_has_only_begun_has_a_page(run: Path, tmp_path: Path) -> None:
    begun = tmp_path / "run"
    shutil.copytree(run, begun)
    for name in ("store", "events", "blobs"):
        shutil.rmtree(begun / name)
    for name in ("metrics.jsonl", "eval.jsonl", "proc.jsonl"):
        (begun / name).unlink()
    page = Page(write_report(begun, tmp_path / "page.html").read_text())
    assert page.open == []
    assert "nothing yet" in page.text


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no run"):
        write_report(tmp_path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name", ["journal.sqlite", "metrics.jsonl", "eval.jsonl", "events/worker-0.jsonl"])
def test_a_damaged_run_is_one_clear_line(run: Path, tmp_path: Path, name: str) -> None:
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    (damaged / name).write_bytes(b"nonsense\n" * 2000)
    with pytest.raises(RunFolderError, match=r"damaged|no journal|cannot be read") as caught:
        write_report(damaged, tmp_path / "page.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()
