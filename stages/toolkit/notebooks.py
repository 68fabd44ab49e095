"""Run the notebooks and refresh their outputs, so that these are the same on every run.

    python -m stages.toolkit.notebooks              run all, write their outputs
    python -m stages.toolkit.notebooks 10 12        run these
    python -m stages.toolkit.notebooks --check      run all, write nothing, tell what would change (exit code 1)

Pictures are written, but not compared: another release of matplotlib draws other bytes.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PROGRESS = re.compile(r"(building \S+ \(.*\) \.\.\. .*\n?)*")  # a first use tells that it builds, and how long it took


def paths(chosen: Sequence[str] = ()) -> list[Path]:
    """The files of the notebooks, all or those of the given numbers or names."""
    known = sorted(FOLDER.glob("[0-9]*_*.ipynb"))
    for word in chosen:
        if not any(path.stem.startswith(word) for path in known):
            raise SystemExit(f"no notebook is called {word!r}; there are: {', '.join(path.stem for path in known)}")
    return [path for path in known if not chosen or any(path.stem.startswith(word) for word in chosen)]


def execute(path: Path) -> NotebookNode:
    """A notebook after a run, as it would be written. It runs without a GPU, on whatever machine.

    Raises:
        CellExecutionError: A cell raised. The text has the cell and the traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": search}
    quiet = ["--IPKernelApp.log_level=ERROR"]  # no word about unencrypted local connections
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=quiet,
    ).execute(env=environment)
    return normalised(notebook)


def normalised(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs from run to run: metadata, times, progress; cells counted from 1."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = [output for output in _joined(cell.outputs) if not _is_progress(output)]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of one stream as one output: how they are cut depends on timing."""
    result: list[NotebookNode] = []
    for output in outputs:
        if result and output.output_type == "stream" == result[-1].output_type and output.name == result[-1].name:
            result[-1].text += output.text
        else:
            result.append(output)
    return result


def _is_progress(output: NotebookNode) -> bool:
    return output.output_type == "stream" and output.name == "stderr" and bool(PROGRESS.fullmatch(output.text))


def text(notebook: NotebookNode) -> list[str]:
    """All that can be compared: sources, and outputs with pictures by their kind only, as lines."""
    lines = []
    for number, cell in enumerate(notebook.cells, 1):
        lines += [f"[cell {number}, {cell.cell_type}]", *cell.source.splitlines()]
        for output in cell.get("outputs", ()):
            lines.append(f"[output of cell {number}: {output.output_type}]")
            data = output.get("data") or {output.get("name", "error"): output.get("text") or output.get("evalue", "")}
            for kind, value in sorted(data.items()):
                lines += [f"[{kind}]", *([] if kind.startswith("image/") else str(value).splitlines())]
    return lines


def differences(committed: NotebookNode, fresh: NotebookNode) -> list[str]:
    """What a run changed in the text of a notebook, as a unified diff; empty if nothing."""
    return list(difflib.unified_diff(text(committed), text(fresh), "committed", "fresh", lineterm="", n=2))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.toolkit.notebooks", description="Run the notebooks.")
    parser.add_argument("notebooks", nargs="*", metavar="NN", help="numbers or names; all if none is given")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if an output would change")
    options = parser.parse_args(arguments)
    failed = False
    for path in paths(options.notebooks):
        before = nbformat.read(path, as_version=4)
        try:
            fresh = execute(path)
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed = True
            continue
        changes = differences(before, fresh)
        if not options.check:
            nbformat.write(fresh, path)
        elif changes:
            failed = True
            print("\n".join(changes))
        print(f"{path.name}: {'the same' if not changes else 'differs' if options.check else 'refreshed'}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
