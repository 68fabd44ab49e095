"""Stage 53: discretizations of a full matrix."""

from stages.families import discretize_matrix
from stages.toolkit.stage import Stage

BEHIND = "behind the last column are zeros until the norm is known"
LAST = "a lane without a row has zeros, and comes after all rows that are as small"
EQUIVALENT = {
    "int turn = row < n ? n : -1;  [row < n -> row <= n]": LAST,
    "int turn = row < n ? n : -1;  [row < n -> true]": LAST,
    "if (turn == n) most = std::abs(own[0]) >= 0 ? std::abs(own[0]) : T(INFINITY);  [std::abs(own[0]) >= 0 -> true]": (
        "of NaN, which is in no problem here; the test with it fails"
    ),
    "if (other > most || (other == most && other_at < at)) most = other, at = other_at;  "
    "[other_at < at -> other_at <= at]": "no two lanes speak for the same row",
    "for (int k = 0; k < WIDTH; ++k) {  [k < WIDTH -> k <= WIDTH]": "there are never so many unknowns",
    "for (int row = 0; row < z.rows; ++row) norm += std::abs(z(row, group.lane));  [row < z.rows -> row <= z.rows]": (
        "a norm that is too large halves once more, to the same result"
    ),
    "if (group.lane < z.columns) {  [group.lane < z.columns -> group.lane <= z.columns]": BEHIND,
    "if (group.lane < z.columns) {  [group.lane < z.columns -> true]": BEHIND,
    "norm = other > norm ? other : norm;  [other > norm -> other >= norm]": "the same either way where they are equal",
    "return std::isfinite(norm) && norm > T(0.5) ? std::ilogb(norm) + 2 : 0;  [norm > T(0.5) -> norm >= T(0.5)]": (
        "the series is good for a half, too"
    ),
    "for (int t = 0; t < most; ++t) {  [t < most -> t <= most]": "nobody needs that one, so nobody keeps it",
}


def sectors(M: int, m: int, method: str) -> tuple[int, int]:
    """What the forward loads and stores in global memory, float32, n = 16 and m = 8 or 16, M a multiple of 8.

    Rows of A and A_bar are two sectors each, those of B and its factors m / 8, which a warp takes of two systems at a
    time; the two steps are one.
    """
    inputs = 2 if method == "foh" else 1
    loads_of_a, loads_of_b = {"bilinear": (2, 1), "zoh": (1, 2), "foh": (1, 3)}[method]
    loads = 16 * M * (2 * loads_of_a + m // 8 * loads_of_b) + M // 2
    return loads, 16 * M * (2 + m // 8 * inputs)


stage = Stage(
    __file__,
    family=discretize_matrix,
    lesson="solves and exponentials of small matrices, a few lanes for each",
    aligned=(8, 8, 4),
    registers=255,
    spills=True,  # 16 bytes of double with more than 16 rows; three numbers that are chosen by an index
    dtypes=discretize_matrix.DTYPES,
    options=tuple({"method": method} for method in discretize_matrix.METHODS),
)
