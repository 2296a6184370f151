"""Draw the README's chart of restarts from the figures of docs/bench.md.

``python scripts/docs/chart.py`` writes it; with ``--check`` it only says whether it is up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "bench.md"
CHART = ROOT / "docs" / "pictures" / "restart.svg"
ROW = re.compile(
    r"^\| a worker exits → next first all-reduce, (\d) workers[^|]*\| ([\d.]+) s[^|]*\| ([\d.]+) s",
    re.MULTILINE,
)
WIDTH, LEFT, SCALE = 760, 112, 96.0
"""Pixels: of the picture, before the bars, and for a second."""
TEXT = "font-family: ui-sans-serif, system-ui, sans-serif; font-size: 15px; fill: #24292f;"


def chart(rows: list[tuple[str, str, str]]) -> str:
    """Return the picture of (workers, seconds of torchrun, seconds of elaunch)."""
    height = 80 + 72 * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>text {{ {TEXT} }} .small {{ font-size: 13px; fill: #57606a; }}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        '<text x="24" y="34" font-weight="bold">'
        "A worker exits: seconds until all workers are in the next all-reduce</text>",
    ]
    for number, (workers, *seconds) in enumerate(rows):
        top = 60 + 72 * number
        parts.append(f'<text x="24" y="{top + 33}">{workers} workers</text>')
        launchers = (("torchrun", "#8c959f"), ("elaunch", "#3f51b5"))
        for line, ((name, colour), value) in enumerate(zip(launchers, seconds, strict=True)):
            y, length = top + 28 * line, max(float(value) * SCALE, 2.0)
            label = f"{float(value):.2f} s {name}"
            parts += [
                f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="22" fill="{colour}"/>',
                f'<text x="{LEFT + length + 8:.0f}" y="{y + 16}">{label}</text>',
            ]
    note = "Two CPU cores (AMD EPYC), torch 2.13, gloo; medians: make bench, docs/bench.md"
    parts += [f'<text class="small" x="24" y="{height - 22}">{note}</text>', "</svg>\n"]
    return "\n".join(parts)


def main() -> int:
    """Write the chart, or check it."""
    rows = ROW.findall(PAGE.read_text())
    drawn = chart(rows)
    if sys.argv[1:] != ["--check"]:
        CHART.write_text(drawn)
    elif not rows or CHART.read_text() != drawn:
        print(f"{CHART.name} is out of date: run python scripts/docs/chart.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
