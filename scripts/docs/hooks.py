"""What `make docs` adds for mkdocs: pages from outside docs/, and links that lead out of it.

The files stay as they are read in the repository: a link to another file there, such as an
example, becomes its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
PAGES = {"../examples/README.md": "examples.md"}
"""Pages from outside docs/ by their place as docs/ links to it, and their name in the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for place, name in PAGES.items():
        text = (ROOT / "docs" / place).read_text().replace("](../docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links that lead out of docs/ to the page that was added, or into words."""
    return re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)", _inside, markdown)


def _inside(link: re.Match[str]) -> str:
    words, target, anchor = link[1], link[2], link[3] or ""
    return f"[{words}]({PAGES[target]}{anchor})" if target in PAGES else words
