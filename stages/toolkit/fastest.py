"""A family's function by whichever of its stages is the fastest for the arguments: `stages.scan`, `stages.matmul`."""

import functools
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stages.toolkit.stage import load


def fastest(family: ModuleType) -> Callable[..., Any]:
    """The function `stages.<family.NAME>`. Its attribute `choose` says for such arguments which stage, and why.

    The rule is the family's `choose`. What the stage that it names raises is raised, too: no other one is tried.
    """
    functions = {name: load(name).function for name in family.FASTEST}
    choose = family.choose
    choose.__qualname__ = family.NAME  # what Python calls it where an argument is missing

    @functools.wraps(functions[family.FASTEST[0]])
    def function(*arguments: Any, **options: Any) -> Any:
        return functions[choose(*arguments, **options).stage](*arguments, **options)

    summary, _, rest = inspect.getdoc(function).partition("\n")
    rest = re.sub(r"stages\.load\(.*?\)\.", "stages.", rest)  # in the examples
    which = f"By the stage that is the fastest for the arguments: `stages.{family.NAME}.choose` tells which, and why."
    function.__doc__ = f"{summary}\n\n{which}\n{rest}"
    function.choose = choose
    return function
