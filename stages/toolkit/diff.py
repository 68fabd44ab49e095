"""What changed from one stage to another: the lesson, as two ideas and one diff."""

import difflib
import textwrap

from stages.toolkit import render
from stages.toolkit.stage import Stage

COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
RESET = "\033[0m"


def code(stage: Stage) -> list[str]:
    """The kernel's lines from its first #include or import on, without the header comment."""
    lines = stage.source.read_text(encoding="utf-8").splitlines()
    return lines[next((i for i, line in enumerate(lines) if line.startswith(("#include", "import"))), 0) :]


def language(stage: Stage) -> str:
    return "Triton" if stage.in_triton else "CUDA C++"


def lesson(before: Stage, after: Stage, colour: bool = False) -> str:
    """The Idea of both headers, then a unified diff of the code, if both are in one language; with colour, if told."""
    parts = []
    for stage in (before, after):
        idea = " ".join(stage.header.get("Idea", "(no Idea in the header)").split())
        parts.append(f"{stage.name}: {stage.title}\n{textwrap.indent(render.wrap(idea), '  ')}\n")
    if before.in_triton != after.in_triton:
        lines = [len(code(stage)) for stage in (before, after)]
        told = (
            f"{before.source.name} is in {language(before)}, {lines[0]} lines, and {after.source.name} in "
            f"{language(after)}, {lines[1]}: no line of the one is in the other. Lay them side by side."
        )
        return "\n".join([*parts, render.wrap(told)])
    files = [f"stages/{stage.name}/{stage.source.name}" for stage in (before, after)]
    lines = list(difflib.unified_diff(code(before), code(after), *files, lineterm=""))
    if colour:
        lines = [f"{COLOURS[line[0]]}{line}{RESET}" if line[:1] in COLOURS else line for line in lines]
    return "\n".join(parts + (lines or ["The code is the same."]))
