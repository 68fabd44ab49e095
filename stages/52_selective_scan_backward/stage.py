"""Stage 52: the gradients of the selective scan."""

import importlib

from stages.families import COMPLEX, FLOATING, selective_scan
from stages.toolkit.stage import Stage

forward = importlib.import_module("stages.51_selective_scan.stage")

EQUIVALENT = {}

stage = Stage(
    __file__,
    family=selective_scan,
    lesson="the gradients of the selective scan: states computed again, lanes as pieces of time",
    cost=forward.cost,
    aligned=(1, 16, 16, 128),
    registers=255,
    spills=True,
    dtypes=FLOATING + COMPLEX,
    options=tuple({"discretization_method": method} for method in ("mamba", "foh", "bilinear")),  # one of each kind
    define={"states_of_a_lane": forward.states_of_a_lane},
)
