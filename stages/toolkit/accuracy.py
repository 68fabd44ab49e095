"""How far the results of a stage are from float64 after many steps: its own rounding errors, which add up.

The arguments are those of the family's `make_long`, rounded to the dtype before anything is computed, so that the
reference starts from the same numbers. `accuracy --record` writes the errors down, in stages/measured/accuracy.json,
with the kernel's fingerprint; the tests hold them against the kernels as they are.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stages.families import widened
from stages.toolkit import build, chapter, mutate, render
from stages.toolkit.device import processor
from stages.toolkit.stage import Stage, load, names
from stages.toolkit.verify import output_names, outputs, relative_error

PATH = build.PACKAGE / "measured" / "accuracy.json"
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
FORMULA = "torch"  # what a user would call instead, not compiled: a name beside those of the stages


def stages() -> list[Stage]:
    """Those whose family says on which arguments errors add up, and whose kernels the CPU device runs."""
    every = [load(name) for name in names()]
    return [stage for stage in every if hasattr(stage.family, "make_long") and stage.source.suffix == ".cu"]


def measure(stage: Stage, device: str = "cpu") -> list[dict[str, Any]]:
    """An entry for each dtype that the stage takes and each layout; layouts with the same errors are one entry."""
    found = []
    for dtype in DTYPES:
        if dtype not in stage.dtypes:
            continue
        entries: list[dict[str, Any]] = []
        for options in stage.options(dtype):
            errors = compare(stage.family, stage.function, dtype, device, options)
            if not options.get("reverse") and errors not in [entry["errors"] for entry in entries]:
                entries.append({"dtype": str(dtype).removeprefix("torch."), "options": options, "errors": errors})
        found += entries
    return found


def measure_formula(family: ModuleType) -> list[dict[str, Any]]:
    """The same of what a user would call instead."""
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "options": {},
            "errors": compare(family, family.incumbent, dtype, "cpu", {}),
        }
        for dtype in DTYPES
    ]


def compare(
    family: ModuleType, function: Callable, dtype: torch.dtype, device: str, options: Mapping[str, Any]
) -> dict[str, float]:
    """r = |x - ref| / |ref| of the result and of each gradient."""
    arguments, grads = family.make_long(dtype, device, **options)
    found, truths = _results(function, arguments, grads, options), _truth(family, dtype, tuple(options.items()))
    keys = (*output_names(family, options), *list(inspect.signature(function).parameters)[: len(arguments)])
    errors = (relative_error(x.cpu(), ref) for x, ref in zip(found, truths, strict=True))
    return {key: float(f"{error:.3g}") for key, error in zip(keys, errors, strict=True)}


@cache
def _truth(family: ModuleType, dtype: torch.dtype, options: tuple) -> list[Tensor]:
    arguments, grads = ([widened(x) for x in tensors] for tensors in family.make_long(dtype, **dict(options)))
    return _results(family.reference, arguments, grads, dict(options))


def _results(function: Callable, arguments: Iterable, grads: Iterable, options: Mapping[str, Any]) -> list[Tensor]:
    """What the function gives, and the gradients of its arguments."""
    given = [x.detach().requires_grad_() for x in arguments]
    results = outputs(function(*given, **options))
    return [*(x.detach() for x in results), *torch.autograd.grad(results, given, grads)]


# ---------------------------------------------------------------------------------------------------------------------
# The record


def read_record() -> dict[str, Any]:
    """What is recorded: the machine, and for each stage the kernel's fingerprint and its entries."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {"stages": {}}


def write_record(entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Add the entries of these stages to the record."""
    every = dict(read_record()["stages"])
    for name, own in entries.items():
        every[name] = {"kernel": fingerprint(name), "entries": own}
    machine = {"device": "the CPU device", "processor": processor(), "compiler": build.host_compiler().version}
    record = {**machine, "date": date.today().isoformat(), "stages": dict(sorted(every.items()))}
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def fingerprint(name: str) -> str:
    """Of a stage's kernel; of what a user would call instead there is none."""
    return "" if name == FORMULA else mutate.fingerprint(load(name).source.read_text(encoding="utf-8"))


def rows(entries: Mapping[str, Iterable[Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """A table's headings and cells; a stage's name stands in the first of its lines."""
    found: list[list[str]] = []
    keys: list[str] = []
    for name, own in entries.items():
        label = "the formula in torch" if name == FORMULA else chapter.short_name(load(name))
        for entry in own:
            keys = keys or list(entry["errors"])
            cells = [f"{error:.1e}" for error in entry["errors"].values()]
            found.append([label, chapter.dtype_name(entry["dtype"], entry["options"]), *cells])
            label = ""
    outs = [key for key in keys if key == "output"] or keys[:1]
    return ["", "dtype", *("result" if key in outs else f"gradient of {key}" for key in keys)], found


def text(entries: Mapping[str, Iterable[Mapping[str, Any]]]) -> str:
    """The table for a terminal."""
    header, lines = rows(entries)
    return render.table(header, lines, "<<" + ">" * (len(header) - 2))
