"""Stage 13, matmul_register."""

from matmul_cases import MatmulCases

import stages


class TestMatmulRegister(MatmulCases):
    stage = stages.load("13")
