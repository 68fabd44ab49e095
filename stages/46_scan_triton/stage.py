"""Stage 46: the first-order scan in Triton, a program for a tile."""

from stages.families import scan
from stages.toolkit.stage import Stage

stage = Stage(
    __file__,
    family=scan,
    lesson="in Triton: a program for a tile, and no threads",
    bench={"cpu": ((1, 1024, 64),)},  # what the build check compiles the kernel for
    aligned=(1, 64, 16),  # where the tests take their sizes from
    options=({}, {"time_dim": 2}, {"time_dim": 2, "reverse": True}),
)
