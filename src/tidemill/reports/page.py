"""One page about a run: self-contained HTML, no script and no request; what the policy wrote is escaped, always."""

from collections.abc import Callable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from tidemill.core.errors import RunFolderError
from tidemill.core.files import write_whole
from tidemill.core.records import Episode
from tidemill.reports import page_episodes, page_sections
from tidemill.reports.audit import AuditReport, NoRun, audit
from tidemill.reports.rundata import RunData

Originals = Callable[[Episode], Mapping[str, bytes]]
"""Episode → path → content before the agent came, of the paths in its patch. An empty answer: not known."""


def write_report(
    folder: Path, out: Path, *, audited: AuditReport | None = None, originals: Originals | None = None
) -> Path:
    """Write the page about a run to `out`, whole or not at all; returns `out`.

    `audited`: the outside audit's result, made here where it is not given. Raises `RunFolderError` where `folder` is
    no run, or one whose journal or logs are damaged.
    """
    data = RunData(folder)
    try:
        html = render(data, audited or audit(folder), originals)
    except NoRun as error:
        raise RunFolderError(str(error)) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, html.encode("utf-8", "replace"))
    out.chmod(0o644)
    return out


def render(data: RunData, audited: AuditReport, originals: Originals | None = None) -> str:
    """The page as text."""
    css = files("tidemill.reports").joinpath("page.css").read_text()
    curves = page_sections.curves(data)
    sections = [
        page_sections.header(data, audited),
        page_sections.section(
            "Learning", "One point per update; thin lines are the batches, thick ones their moving average.", curves
        ),
        page_sections.evaluation(data),
        page_sections.section(
            "Accounting",
            "Every attempt is trained on, queued, or rejected for a reason that is written down.",
            page_sections.accounting(data, audited),
        ),
        page_sections.section(
            "Outside audit",
            "Recomputed from journal, blobs, store, events and /proc samples, by code that the services do not share.",
            page_sections.audit_table(audited),
        ),
        page_sections.section(
            "The five services",
            "The coloured strip of a lane says what the service did, the area above it how much of a core it used.",
            page_sections.lanes(data),
        ),
        page_sections.costs(data, audited),
        page_sections.section(
            "Five episodes, turn by turn",
            "Text is what the policy saw and wrote, decoded from its token ids.",
            page_episodes.episodes(data, originals),
        ),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Tidemill: {escape(data.folder.resolve().name)}</title><style>{css}</style></head>"
        f"<body><main>{''.join(sections)}<footer>Written by Tidemill from {escape(str(data.folder))}; "
        "this file needs nothing but itself.</footer></main></body></html>\n"
    )
