"""How long prices take; figures beside each other, never an assertion on time."""

import numpy as np
import pytest

from overlapsim.cost.collective import CollectiveModel
from overlapsim.hardware.loading import load_cluster

SIZES = np.random.default_rng(0).uniform(1e3, 1e9, 3000)


@pytest.mark.benchmark
@pytest.mark.parametrize("ranks", [8, 6], ids=["table", "fit"])
def test_3000_sizes(benchmark, ranks):
    model = CollectiveModel(load_cluster("h100-sxm8"), "all_reduce", ranks)
    assert model.basis == ("table" if ranks == 8 else "fit")
    assert benchmark(model.seconds, SIZES).shape == SIZES.shape


@pytest.mark.benchmark
def test_build_a_fitted_model(benchmark):
    cluster = load_cluster("h100-sxm8")
    assert benchmark(CollectiveModel, cluster, "all_reduce", 6).basis == "fit"
