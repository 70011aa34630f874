"""The coefficients in npattn/layers/_normal.py, and the table that they are tested against: ``python tests/data/normal_tail.py``.

It needs mpmath. It prints the coefficients, and writes normal_tail.npz beside this file: numbers x and Φ(x), the normal
distribution computed with 50 digits and rounded once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def quotient(p_degree: int, q_degree: int, end: float) -> tuple[list[float], list[float], float]:
    """P and Q, from the constant up, and their largest relative error for Φ(-t) exp(t²/2) = P(t)/Q(t) on 0 <= t <= end.

    The Remez exchange: at as many points as there are unknowns, the error has one size and alternating signs; then the points
    move to where the error is largest, until it is largest where they are.
    """
    from mpmath import erfc, exp, lu_solve, matrix, mp, mpf, polyval, sqrt

    mp.dps = 70

    def exact(t: Any) -> Any:
        return erfc(t / sqrt(mpf(2))) * exp(t * t / 2) / 2

    unknown = p_degree + q_degree + 2
    # in y = (t - 2) / (t + 2) the function changes evenly
    ends = mpf(-1), (mpf(end) - 2) / (mpf(end) + 2)
    grid = [2 * (1 + y) / (1 - y) for y in (ends[0] + (ends[1] - ends[0]) * n / 3000 for n in range(3001))]
    values = [exact(t) for t in grid]
    points = [round(1500 - 1500 * float(np.cos(np.pi * n / (unknown - 1)))) for n in range(unknown)]
    size, p, q = mpf(0), [mpf(1)], [mpf(1)]
    for _ in range(20):
        for _ in range(20):  # p - f q = ± size f q is linear but for the last product, where q is that of the step before
            a, b = matrix(unknown, unknown), matrix(unknown, 1)
            for row, n in enumerate(points):
                t, f = grid[n], values[n]
                powers = [t**k for k in range(max(p_degree, q_degree) + 1)]
                a[row, :] = matrix(
                    [
                        powers[: p_degree + 1]
                        + [-f * x for x in powers[1 : q_degree + 1]]
                        + [-((-1) ** row) * f * polyval(q[::-1], t)]
                    ]
                )
                b[row] = f
            found = list(lu_solve(a, b))
            p, q = found[: p_degree + 1], [mpf(1), *found[p_degree + 1 : -1]]
            size, before = found[-1], size
            if abs(size - before) <= abs(size) / 10**6:
                break
        errors = [polyval(p[::-1], t) / polyval(q[::-1], t) / f - 1 for t, f in zip(grid, values, strict=True)]
        peaks: list[int] = []
        for n, error in enumerate(errors):
            if not peaks or (error > 0) != (errors[peaks[-1]] > 0):
                peaks.append(n)
            elif abs(error) > abs(errors[peaks[-1]]):
                peaks[-1] = n
        while len(peaks) > unknown:
            peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
        points = peaks
        worst = max(abs(error) for error in errors)
        if worst < abs(size) * mpf("1.001"):
            break
    return [float(c) for c in p], [float(c) for c in q], float(worst)


def distribution(x: np.ndarray) -> np.ndarray:
    """Φ(x), to the last bit."""
    from mpmath import erfc, mp, mpf, sqrt

    mp.dps = 50
    return np.asarray([float(erfc(-mpf(float(number)) / sqrt(mpf(2))) / 2) for number in x])


def numbers() -> tuple[np.ndarray, np.ndarray]:
    """Where to look: float64 and float32 numbers, from the last x whose Φ(x) is normal to where Φ(x) is 1."""
    rng = np.random.default_rng(0)
    tiny = 10.0 ** rng.uniform(-300, 0, 200) * rng.choice([-1, 1], 200)
    doubles = np.concatenate([np.linspace(-37.5, 9, 1601), rng.uniform(-37.5, 9, 800), tiny])
    singles = np.concatenate([np.linspace(-12.94, 6, 801), rng.uniform(-12.94, 6, 400)])
    return doubles, singles.astype(np.float32).astype(np.float64)


def main() -> None:
    """Print the coefficients and write the table."""
    for dtype, degrees, end in (("float64", (9, 10), 39.0), ("float32", (4, 5), 15.0)):
        p, q, worst = quotient(*degrees, end)
        print(f"{dtype}, largest relative error {worst:.2g}", *p, "", *q, "", sep="\n")
    doubles, singles = numbers()
    np.savez_compressed(
        Path(__file__).with_suffix(".npz"),
        float64_x=doubles,
        float64_cdf=distribution(doubles),
        float32_x=singles,
        float32_cdf=distribution(singles),
    )


if __name__ == "__main__":
    main()
