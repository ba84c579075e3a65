"""`content`: a document of the planner in the format that the end of a file's name says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from nearpeak.errors import UsageError
from nearpeak.render.document import Document, csv_text, markdown, text
from nearpeak.render.html.document import document_page
from nearpeak.render.views.plan.sliders import Sliders

DocumentFormat = Literal["html", "svg", "markdown", "csv", "json", "text"]
DOCUMENT_ENDINGS: Mapping[str, DocumentFormat] = {
    ".html": "html",
    ".svg": "svg",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".txt": "text",
}


def document_format(path: str | Path, document: Document) -> DocumentFormat:
    """The format that a name ends with; UsageError for any other, and for a picture of what has none."""
    found = DOCUMENT_ENDINGS.get(Path(path).suffix.lower())
    if found is None:
        raise UsageError(f"{path}: a plan is written as one of {', '.join(DOCUMENT_ENDINGS)}.")
    if found == "svg" and not document.pictures:
        raise UsageError(f"{path}: this answer has no picture. It is written as one of .html, .md, .csv, .json, .txt.")
    return found


def document_content(document: Document, form: DocumentFormat, sliders: Sliders | None = None) -> str:
    """The file. JSON is that of the answer itself, which a document no longer is."""
    if form == "html":
        return document_page(document, sliders)
    if form == "svg":
        return document.pictures[0].svg
    if form == "markdown":
        return markdown(document)
    if form == "csv":
        return csv_text(document)
    return text(document) + "\n"
