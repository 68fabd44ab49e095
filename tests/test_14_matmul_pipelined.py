"""Stage 14, matmul_pipelined."""

from matmul_cases import MatmulCases

import stages


class TestMatmulPipelined(MatmulCases):
    stage = stages.load("14")
