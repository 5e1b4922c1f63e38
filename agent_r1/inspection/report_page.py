"""A report as one HTML file, for somebody who has nothing else: its pictures are inside, and a page of the viewer."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = """
:root {color-scheme: light dark}
body {font: 1rem/1.5 system-ui, sans-serif; max-width: 64rem; margin: auto; padding: 1rem}
table {border-collapse: collapse; display: block; overflow-x: auto}
td, th {padding: .2rem .6rem; border-bottom: 1px solid #8886}
img {max-width: 100%; background: white}
iframe {width: 100%; height: 90vh; border: 1px solid #8886}
"""


def report_page(folder: Path, viewer: str) -> str:
    """The HTML of a folder's report. Below it stands `viewer`, the HTML of the viewer's page, unless that is ""."""
    text = MarkdownIt("commonmark", {"html": False}).enable("table").render((folder / "report.md").read_text())
    for picture in folder.glob("*.png"):
        inside = base64.b64encode(picture.read_bytes()).decode()
        text = text.replace(f'src="{picture.name}"', f'src="data:image/png;base64,{inside}"')
    if viewer:
        text += f'<h2>Test questions before and after training</h2><iframe srcdoc="{escape(viewer)}"></iframe>'
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Report</title><style>{STYLE}</style>{text}'
