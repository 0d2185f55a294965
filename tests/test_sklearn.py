"""The scikit-learn estimator: scikit-learn's own checks, and the library's steps done by hand."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import torch
from joblib import parallel_config
from scipy.stats import binom
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils import check_random_state
from sklearn.utils.estimator_checks import parametrize_with_checks

import fullcp
from fullcp.data import Standardizer
from fullcp.sklearn import FullConformalMLPRegressor
from fullcp.training import mlp, replicate, train

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, 1.0]
y = 100 + 20 * np.sin(X[:, 0]) + X[:, 1] + 2 * rng.normal(size=120)
Y = np.column_stack([y, -3 * y + rng.normal(size=120), X[:, 2]])


def quick(**settings):
    return FullConformalMLPRegressor(**{"max_iter": 30, "random_state": 0, **settings})


@pytest.fixture(scope="module")
def fitted():
    return quick().fit(X, y)


# Passing takes an R^2 of one half on 200 rows, and 10 epochs are enough for it; fewer rows take a few more.
@parametrize_with_checks(
    [FullConformalMLPRegressor(max_iter=10), FullConformalMLPRegressor(max_iter=15, guarantee=True)]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


# The same as the library's steps


@pytest.mark.parametrize(
    ("settings", "tuning"),
    [
        ({"max_iter": 100}, fullcp.training.Schedule(burn_in=10, every=5)),
        ({"max_iter": 1100, "hidden_layer_sizes": 5}, fullcp.training.Schedule()),
        ({"max_iter": 50, "l2": 3.0, "refine": True, "conformity_score": "deleted", "residuals": "signed"}, None),
    ],
)
def test_the_steps_by_hand_give_the_same(settings, tuning):
    regressor = FullConformalMLPRegressor(random_state=7, **settings).fit(X, y)
    seed = check_random_state(7).randint(np.iinfo(np.int32).max)
    x_scaler, y_scaler = Standardizer.of(X), Standardizer.of(y)
    A, b = x_scaler.transform(X), y_scaler.transform(y)
    hidden = (settings.get("hidden_layer_sizes", 50),)
    (model,) = replicate(lambda: mlp(3, hidden), [seed])
    l2 = settings.get("l2", "marglik")
    training = train(model, A, b, l2=l2, epochs=settings["max_iter"], seed=seed, tuning=tuning)
    cp = fullcp.FullConformalRegressor(
        model.double(),
        l2=training.l2,
        refine=settings.get("refine", False),
        score=settings.get("conformity_score", "studentized"),
        residuals=settings.get("residuals", "auto"),
    ).conformalize(A, b)

    expected = cp.predict_interval(A[:9], [0.8, 0.9])
    found = regressor.predict_interval(X[:9], [0.8, 0.9])
    np.testing.assert_array_equal(found.prediction, expected.prediction * y.std() + y.mean())
    np.testing.assert_array_equal(found.intervals, expected.intervals * y.std() + y.mean())
    assert found.levels == expected.levels == (0.8, 0.9)
    np.testing.assert_array_equal(regressor.predict(X[:9]), found.prediction)
    np.testing.assert_array_equal(regressor.p_value(X[:9], y[:9]), cp.p_value(A[:9], b[:9]))
    np.testing.assert_allclose(
        np.ravel(regressor.predict_set(X[:9])), np.ravel(cp.predict_set(A[:9])) * y.std() + y.mean()
    )
    np.testing.assert_array_equal(regressor.l2_, training.l2)
    assert regressor.loss_curve_ == training.losses
    assert regressor.n_iter_ == len(regressor.loss_curve_) == settings["max_iter"]
    assert regressor.log_marginal_likelihood_ == training.log_marginal_likelihood
    assert regressor.noise_ == (None if l2 == 3.0 else pytest.approx(training.noise * y.std()))


@pytest.mark.parametrize("calibration", [None, 0.3])
def test_with_a_guarantee_calibration_rows_are_held_out_of_everything(calibration):
    regressor = FullConformalMLPRegressor(max_iter=60, random_state=7, guarantee=True, calibration=calibration)
    regressor.fit(X, y)
    held = regressor.calibration_rows_
    rows = np.setdiff1d(np.arange(120), held)
    assert len(held) == (round(120 * fullcp.calibration_share(120, 0.9)) if calibration is None else 36)
    seed = check_random_state(7).randint(np.iinfo(np.int32).max)
    x_scaler, y_scaler = Standardizer.of(X[rows]), Standardizer.of(y[rows])
    A, b = x_scaler.transform(X), y_scaler.transform(y)
    (model,) = replicate(lambda: mlp(3, (50,)), [seed])
    tuning = fullcp.training.Schedule(burn_in=6, every=3)
    training = train(model, A[rows], b[rows], l2="marglik", epochs=60, seed=seed, tuning=tuning)
    cp = fullcp.InformedSplitConformalRegressor(model.double(), l2=training.l2, score="studentized")
    expected = cp.fit(A[rows], b[rows]).conformalize(A[held], b[held]).predict_interval(A[:9], [0.8, 0.9])
    found = regressor.predict_interval(X[:9], [0.8, 0.9])
    np.testing.assert_array_equal(found.intervals, y_scaler.inverse(expected.intervals))
    np.testing.assert_array_equal(regressor.predict(X[:9]), found.prediction)

    changed = y.copy()
    changed[held] += 1000  # moves nothing that was trained, tuned or scaled
    again = clone(regressor).fit(X, changed)
    np.testing.assert_array_equal(again.calibration_rows_, held)
    np.testing.assert_array_equal(again.l2_, regressor.l2_)
    assert again.y_scaler_ == regressor.y_scaler_
    assert all(torch.equal(a, b) for a, b in zip(again.model_.parameters(), regressor.model_.parameters()))


def test_coverage_with_a_guarantee_is_exactly_binomial():
    """An absurd network: of 300 data sets, one test point each, as many are covered as ranks say."""
    rng = np.random.default_rng(5)
    covered = 0
    for i in range(300):
        A = rng.normal(size=(61, 2))
        b = A[:, 0] + (0.1 + np.abs(A[:, 1])) * rng.standard_t(2, size=61)
        settings = {"l2": 1e-3, "hidden_layer_sizes": 8, "guarantee": True, "calibration": 0.65}
        regressor = quick(max_iter=3, learning_rate=(0.3, 0.3), **{**settings, "random_state": i}).fit(A[1:], b[1:])
        covered += int(regressor.p_value(A[:1], b[:1])[0] > 0.2)
    assert len(regressor.calibration_rows_) == 39
    assert binom.ppf(0.0005, 300, 0.8) <= covered <= binom.ppf(0.9995, 300, 0.8)


def test_a_guarantee_for_several_targets_is_none_and_says_so():
    words = r"guarantees nothing here: y has 3 targets.* Fit one estimator for each target, or take fullcp\.Normalized"
    with pytest.warns(UserWarning, match=words):
        quick(guarantee=True).fit(X, Y)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quick(guarantee=True).fit(X, y)
        quick().fit(X, Y)
    assert not any("guarantees nothing" in str(warning.message) for warning in seen)


def test_what_a_guarantee_cannot_take():
    for settings, message in (
        ({"guarantee": "yes"}, "guarantee must be True or False"),
        ({"calibration": "half"}, "calibration must be a number"),
    ):
        with pytest.raises(TypeError, match=message):
            quick(**settings).fit(X, y)
    with pytest.raises(ValueError, match="calibration must lie between 0 and 1"):
        quick(guarantee=True, calibration=1.0).fit(X, y)
    with pytest.raises(ValueError, match="needs at least 4 rows"):
        quick(guarantee=True).fit(X[:3], y[:3])


def test_units_of_the_data_do_not_matter(fitted):
    scaled = quick().fit(8 * X + 16, 4 * y - 32)  # powers of two: no rounding, or little
    np.testing.assert_allclose(
        scaled.predict_interval(8 * X[:9] + 16).intervals, 4 * fitted.predict_interval(X[:9]).intervals - 32, rtol=1e-4
    )


def test_intervals_cover_and_the_network_is_good():
    rng = np.random.default_rng(1)

    def draw(rows):
        A = rng.uniform(-2, 2, size=(rows, 2))
        return A, 50 + 30 * np.sin(2 * A[:, 0]) * A[:, 1] + 3 * rng.normal(size=rows)

    regressor = FullConformalMLPRegressor(random_state=0).fit(*draw(250))
    A, b = draw(3000)
    assert regressor.score(A, b) > 0.95  # the noise leaves 0.985
    for level in (0.8, 0.9):
        found = regressor.predict_interval(A, level)
        covered = np.mean((found.lower[:, 0] <= b) & (b <= found.upper[:, 0]))
        assert abs(covered - level) < 0.06  # 2.5 standard deviations with 250 rows
    assert 2 < regressor.noise_ < 4


def test_sets_intervals_and_p_values_agree(fitted):
    found = fitted.predict_interval(X[:5], 0.8)
    sets = fitted.predict_set(X[:5], 0.8)
    np.testing.assert_allclose([s[0][0] for s in sets], found.lower[:, 0])
    np.testing.assert_allclose([s[-1][1] for s in sets], found.upper[:, 0])
    assert (fitted.p_value(X[:5], found.upper[:, 0] + 0.01) <= 0.2).all()
    assert (fitted.p_value(X[:5], found.upper[:, 0] - 0.01) > 0.2).all()
    assert fitted.p_value(X[:5], 100.0).shape == (5,)


def test_the_level_may_be_the_estimators_own():
    regressor = quick(confidence_level=[0.5, 0.8]).fit(X, y)
    assert regressor.predict_interval(X[:4]).intervals.shape == (4, 2, 2)
    assert regressor.predict_interval(X[:4], 0.7).levels == (0.7,)
    assert len(regressor.predict_set(X[:4], 0.8)) == 4
    with pytest.raises(ValueError, match="confidence_level must be a single level"):
        regressor.predict_set(X[:4])


def test_several_targets():
    regressor = quick(max_iter=200).fit(X, Y)
    y_pred, intervals = regressor.predict_interval(X[:6], [0.8, 0.9])
    assert y_pred.shape == (6, 3)
    assert intervals.shape == (6, 2, 2, 3)
    assert regressor.predictor_.residuals_ == "signed"
    assert regressor.noise_.shape == (3,)
    assert regressor.score(X, Y) > 0.8
    found = regressor.predict_interval(X, 0.8)
    covered = (found.lower[:, 0] <= Y) & (found.upper[:, 0] >= Y)
    assert (covered.mean(0) > 0.75).all()
    sets = regressor.predict_set(X[:6], 0.8)
    np.testing.assert_allclose([[s[0][0] for s in row] for row in sets], found.lower[:6, 0])
    assert regressor.p_value(X[:6], Y[:6]).shape == (6, 3)
    assert regressor.p_value(X[:6], Y[:6], joint="bonferroni").shape == (6,)
    joint = regressor.predict_interval(X[:6], 0.8, joint="bonferroni")
    assert (joint.upper > found.upper[:6]).all()
    with pytest.raises(ValueError, match="residuals='absolute' needs one target, y has 3"):
        quick(residuals="absolute").fit(X, Y)


def test_one_column_is_one_target(fitted):
    column = quick().fit(X, y[:, None])
    np.testing.assert_array_equal(column.predict(X), fitted.predict(X))
    np.testing.assert_array_equal(column.p_value(X[:5], y[:5]), fitted.p_value(X[:5], y[:5]))


# What scikit-learn does with estimators


def test_pipeline_and_cross_validation():
    pipeline = make_pipeline(PolynomialFeatures(2), quick(max_iter=100))
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.5
    pipeline.fit(X, y)
    assert pipeline[-1].predict_interval(pipeline[:-1].transform(X[:4])).intervals.shape == (4, 2, 1)


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_grid_search_on_threads_and_processes(backend):
    grid = {"l2": [0.3, "marglik"], "hidden_layer_sizes": [(5,), (5, 5)]}
    alone = GridSearchCV(quick(max_iter=5), grid, cv=2).fit(X, y)
    with parallel_config(backend, n_jobs=2):
        together = GridSearchCV(quick(max_iter=5), grid, cv=2).fit(X, y)
    np.testing.assert_array_equal(together.cv_results_["mean_test_score"], alone.cv_results_["mean_test_score"])
    assert together.predict(X[:3]).shape == (3,)


def test_one_estimator_predicts_on_several_threads(fitted):
    expected = fitted.predict_interval(X).intervals
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: fitted.predict_interval(X).intervals, range(12)):
            np.testing.assert_allclose(found, expected, rtol=1e-12)  # threads may sum in another order


@pytest.mark.parametrize("settings", [{}, {"refine": True}, {"hidden_layer_sizes": ()}])
def test_pickles_and_copies_predict_the_same(settings):
    regressor = quick(**settings).fit(X, y)
    expected = regressor.predict_interval(X, 0.8)
    for twin in (pickle.loads(pickle.dumps(regressor)), copy.deepcopy(regressor)):
        np.testing.assert_array_equal(twin.predict_interval(X, 0.8).intervals, expected.intervals)
        np.testing.assert_array_equal(twin.predict(X), expected.prediction)
        assert twin.predictor_.model is twin.model_
        np.testing.assert_array_equal(twin.fit(X, y).predict(X), expected.prediction)


def test_a_pickle_holds_no_gradients():
    A = np.random.default_rng(1).normal(size=(1000, 3))
    regressor = quick(max_iter=2, l2=1.0).fit(A, A.sum(1))
    regressor.predict_interval(A[:5])
    assert len(pickle.dumps(regressor)) < 8 * 251 * 1000  # those of 251 parameters; the factor is a quarter


def test_a_clone_has_the_settings_and_nothing_else(fitted):
    regressor = clone(quick(l2=np.ones(4), hidden_layer_sizes=[4], device=torch.device("cpu")))
    assert not hasattr(regressor, "model_")
    regressor.fit(X, y)
    assert regressor.l2_.tolist() == [1.0] * 4
    assert regressor.noise_ is None
    assert regressor.log_marginal_likelihood_ is None
    twin = clone(fitted)
    assert not hasattr(twin, "predictor_")
    np.testing.assert_array_equal(twin.fit(X, y).predict(X), fitted.predict(X))


def test_frames_keep_their_columns():
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    regressor = quick().fit(frame, pd.Series(y, index=range(5, 125)))
    assert regressor.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="feature names should match"):
        regressor.predict_interval(frame[["b", "a", "c"]])
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        regressor.predict(X)
    with pytest.raises(ValueError, match="X has 2 features, but FullConformalMLPRegressor is expecting 3"):
        quick().fit(X, y).p_value(X[:, :2], y)


# Random states


def test_the_random_state_decides_and_others_are_left_alone():
    states = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first, second = quick(max_iter=3).fit(X, y), quick(max_iter=3).fit(X, y)
    other = quick(max_iter=3, random_state=1).fit(X, y)
    drawn = [quick(max_iter=3, random_state=r).fit(X, y).predict(X) for r in [np.random.RandomState(0)] * 2]
    assert (np.random.get_state()[1] == states[0]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[1])
    np.testing.assert_array_equal(first.predict(X), second.predict(X))
    assert not np.array_equal(first.predict(X), other.predict(X))
    np.testing.assert_array_equal(first.predict(X), drawn[0])
    assert not np.array_equal(drawn[0], drawn[1])  # the state has moved on
    assert not np.array_equal(*[quick(max_iter=3, random_state=None).fit(X, y).predict(X) for _ in range(2)])


# Bad input


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"hidden_layer_sizes": "50"}, TypeError, "hidden_layer_sizes"),
        ({"hidden_layer_sizes": (5, 0)}, ValueError, "hidden_layer_sizes"),
        ({"hidden_layer_sizes": 2.5}, TypeError, "hidden_layer_sizes"),
        ({"activation": "swish"}, ValueError, "activation"),
        ({"l2": "ml"}, ValueError, "l2"),
        ({"l2": -1.0}, ValueError, "l2"),
        ({"l2": [1.0, 2.0]}, ValueError, "l2"),
        ({"l2": None}, TypeError, "l2"),
        ({"conformity_score": "best"}, ValueError, "conformity_score"),
        ({"residuals": "both"}, ValueError, "residuals"),
        ({"max_iter": 0}, ValueError, "max_iter"),
        ({"max_iter": 10.0}, TypeError, "max_iter"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"learning_rate": 0.01}, TypeError, "learning_rate"),
        ({"learning_rate": (1e-5, 1e-2)}, ValueError, "learning_rate"),
        ({"refine": "yes"}, TypeError, "refine"),
        ({"confidence_level": 90}, ValueError, "confidence_level"),
        ({"device": "abacus"}, ValueError, "device"),
        ({"device": 1.5}, ValueError, "device"),
        ({"memory": "much"}, ValueError, "memory"),
        ({"random_state": "seed"}, ValueError, "RandomState"),
    ],
)
def test_bad_settings_are_named_before_training(settings, error, name, monkeypatch):
    monkeypatch.setattr("fullcp.training.trainer.complete", lambda *_: pytest.fail("it trained"))
    with pytest.raises(error, match=name):
        quick(**settings).fit(X, y)


def test_bad_data():
    with pytest.raises(ValueError, match="1 sample"):
        quick().fit(X[:1], y[:1])
    with pytest.raises(ValueError, match="y contains NaN"):
        quick().fit(X, np.where(y > 100, np.nan, y))
    with pytest.raises(ValueError, match="inconsistent"):
        quick().fit(X, y[:-1])
    with pytest.raises(NotFittedError):
        quick().predict_interval(X)
    with pytest.raises(TypeError, match="sample_weight"):
        quick().fit(X, y, sample_weight=np.ones(120))
    broken = quick(l2="ml")
    with pytest.raises(ValueError, match="l2"):
        broken.fit(X, y)
    with pytest.raises(NotFittedError):
        broken.predict(X)


def test_few_rows_and_constant_targets_fit():
    with pytest.warns(fullcp.InfiniteIntervalWarning):
        few = quick().fit(X[:3], y[:3]).predict_interval(X[:2], 0.9)
    assert np.isinf(few.intervals).all()
    assert not np.isnan(few.intervals).any()
    constant = quick().fit(X, np.full(120, 7.0)).predict_interval(X[:5])
    assert np.isfinite(constant.intervals).all()
    np.testing.assert_allclose(constant.prediction, 7, atol=0.3)


# The module


def test_the_library_without_scikit_learn():
    code = """
import sys
sys.modules["sklearn"] = None
import fullcp
try:
    fullcp.sklearn
except ImportError as error:
    print(error)
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == 'fullcp.sklearn needs scikit-learn 1.6 or later: pip install "fullcp[sklearn]"'


def test_the_module_comes_when_asked_for():
    code = "import sys, fullcp; a = 'sklearn' in sys.modules; fullcp.sklearn.FullConformalMLPRegressor; print(a)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'scikit'"):
        fullcp.scikit  # noqa: B018
