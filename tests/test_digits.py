"""The digits example: at equal queries and each method's best rate, VS2P ends lowest."""

import statistics

import pytest

pytest.importorskip("sklearn")

from examples import digits


def final_losses(method):
    """Mean final training loss over three seeds, for the best rate and its two neighbours in the grid."""
    grid = digits.GRIDS[method]
    best = grid.index(digits.BEST[method])
    means = {}
    for lr in grid[best - 1 : best + 2]:
        runs = [digits.tune(method, lr, seed) for seed in digits.SEEDS]
        assert all(run.queries[-1] in (digits.QUERIES, digits.QUERIES - 1) for run in runs if run.losses[-1] < 1e9)
        means[lr] = statistics.fmean(run.losses[-1] for run in runs)
    return means


@pytest.mark.filterwarnings("ignore:.*not finite:RuntimeWarning")
def test_vs2p_ends_below_mezo_and_stp():
    means = {method: final_losses(method) for method in digits.METHODS}
    for method, of_rates in means.items():
        assert min(of_rates, key=of_rates.__getitem__) == digits.BEST[method]
    lowest = {method: min(of_rates.values()) for method, of_rates in means.items()}
    assert lowest["VS2P"] < 0.9 * min(lowest["MeZO"], lowest["STP"])
