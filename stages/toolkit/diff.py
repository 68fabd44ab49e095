"""What changed from one stage to another: the lesson, as two ideas and one diff."""

import difflib
import textwrap

from stages.toolkit import render
from stages.toolkit.stage import Stage

COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
RESET = "\033[0m"


def code(stage: Stage) -> list[str]:
    """The kernel's lines from its first #include on, without the header comment."""
    lines = stage.source.read_text(encoding="utf-8").splitlines()
    return lines[next((i for i, line in enumerate(lines) if line.startswith("#include")), 0) :]


def lesson(before: Stage, after: Stage, colour: bool = False) -> str:
    """The Idea of both headers, then a unified diff of the code; with colour for a terminal."""
    parts = []
    for stage in (before, after):
        idea = " ".join(stage.header.get("Idea", "(no Idea in the header)").split())
        parts.append(f"{stage.name}: {stage.title}\n{textwrap.indent(render.wrap(idea), '  ')}\n")
    files = [f"stages/{stage.name}/kernel.cu" for stage in (before, after)]
    lines = list(difflib.unified_diff(code(before), code(after), *files, lineterm=""))
    if colour:
        lines = [f"{COLOURS[line[0]]}{line}{RESET}" if line[:1] in COLOURS else line for line in lines]
    return "\n".join(parts + (lines or ["The code is the same."]))
