"""The boxes experiment end to end on drawn images: rows by hand, stages apart, resumption, pictures, the command."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from fullcp import plots
from fullcp.data import drawn_boxes, overlap
from fullcp.evaluation import validity_band
from fullcp.experiments import box_networks, box_tables, boxes, reproduction
from fullcp.experiments.box_networks import Plan, load_trained, split_of, train_seeds
from fullcp.experiments.box_views import View, view_seed
from fullcp.experiments.boxes import BoxRow, evaluate_seed, run, summarise
from fullcp.experiments.results import TRAINING_COLUMNS, read_rows
from fullcp.vision import Recipe, small_backbone

DATA = drawn_boxes(400, size=24, seed=0)
RECIPE = Recipe(epochs=18, batch_size=64, learning_rate=0.05)
FINE = Plan(recipe=RECIPE, trunk=(24, 16), dropout=0.0, pool=6)
FROZEN = Plan(frozen=True, recipe=RECIPE, trunk=(24, 16), dropout=0.0, pool=6)
LEVELS = (0.8, 0.9)
KINDS = {
    ("ACP-GN", "bonferroni"),
    ("ACP-GN", "max"),
    ("LA", "ellipsoid"),
    ("SCP", "bonferroni"),
    ("SCP", "max"),
    ("CRF", "bonferroni"),
    ("CRF", "max"),
    ("CQR", "bonferroni"),
    ("SCP-GN", "bonferroni"),
    ("SCP-GN", "max"),
    ("ACP-GN (split + refine)", "bonferroni"),
    ("ACP-GN (split + refine)", "max"),
    ("ACP-GN (split + refine, own l2)", "bonferroni"),
    ("ACP-GN (split + refine, own l2)", "max"),
    ("informed", "bonferroni"),
    ("informed", "max"),
    ("jackknife+", "bonferroni"),
    ("jackknife+", "max"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The whole experiment: two seeds fine-tuned, and their rows."""
    folder = tmp_path_factory.mktemp("boxes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_EPOCHS", 10)
        rows = list(run(DATA, small_backbone, folder, plan=FINE, seeds=range(2), levels=LEVELS, device="cpu"))
    return folder, rows


def test_every_method_has_its_rows(done):
    _, rows = done
    assert {(row.method, row.joint) for row in rows} == KINDS
    for row in rows:
        assert (row.table == "all") == (row.method in ("ACP-GN", "LA", "jackknife+"))
        assert row.test_rows == 80
        assert row.rows == {"all": 320, "bbox": 80, "bbox_50": 160}[row.table]
        assert 0 < row.volume < float("inf")
        assert row.infinite_share == 0
        assert 0.5 < row.coverage <= 1
        assert row.accuracy > 0.8
        assert row.mean_overlap > (0.25 if row.table == "all" else 0.05)
    by = {(row.seed, row.table, row.method, row.joint, row.level): row for row in rows}
    assert len(by) == len(rows) == 2 * len(LEVELS) * (5 + 2 * 13)
    for (seed, table, method, joint, level), row in by.items():
        if level == 0.8:
            assert row.volume < by[seed, table, method, joint, 0.9].volume


def test_rows_of_split_conformal_prediction_by_hand(done):
    folder, rows = done
    plan, trained = load_trained(folder, 1)
    assert plan == FINE
    split, net = split_of(400, 1, 0.25), trained[0.25]
    f = (net.z.double() @ net.weight.double().T + net.bias.double()) * net.scale.double() + net.center.double()
    sizes = ((DATA.boxes - f).abs() / net.scale).double()
    train = DATA.boxes[torch.cat([split.fit, split.cal])].double()
    units = train.std(0, correction=0)
    torch.testing.assert_close(net.scale, DATA.boxes[split.fit].std(0, correction=0))
    cal = sizes[split.cal]
    half = {
        "bonferroni": cal.sort(0).values[int(np.ceil(0.975 * 81)) - 1] * net.scale.double(),
        "max": cal.amax(1).sort().values[int(np.ceil(0.9 * 81)) - 1] * net.scale.double(),
    }
    for joint, h in half.items():
        (row,) = [
            row
            for row in rows
            if (row.seed, row.table, row.method, row.joint, row.level) == (1, "bbox", "SCP", joint, 0.9)
        ]
        assert row.volume == pytest.approx(float((2 * h / units).prod()), rel=1e-4)
        assert row.volume_in_image == pytest.approx(float((2 * h).prod()), rel=1e-4)
        inside = ((DATA.boxes - f).abs()[split.test] <= h).all(1).double().mean()
        assert row.coverage == pytest.approx(float(inside), abs=1 / 80 + 1e-9)
        found = overlap(f[split.test].float(), DATA.boxes[split.test])
        assert row.localization_error == pytest.approx(float((found < 0.5).double().mean()), abs=1 / 80 + 1e-9)
        assert row.mean_overlap == pytest.approx(float(found.mean()), abs=1e-4)


def test_full_rectangles_are_those_of_corners_one_by_one(done):
    """With Bonferroni each corner is a network of its own, at the level of its share."""
    import fullcp

    folder, _ = done
    _, trained = load_trained(folder, 0)
    part = boxes._part(DATA, trained[0.0], split_of(400, 0, 0.0), 0)
    regions = {(r.method, r.joint): r for r in boxes._full_methods(part, LEVELS)}
    l2 = float(boxes.scalar_tuning(part.head, *part.fit).l2[0])
    for o in range(4):
        alone = torch.nn.Linear(part.head.in_features, 1)
        with torch.no_grad():
            alone.weight.copy_(part.head.weight[o : o + 1])
            alone.bias.copy_(part.head.bias[o : o + 1])
        cp = fullcp.FullConformalRegressor(alone, curvature="last_layer", residuals="signed", l2=l2)
        cp.conformalize(part.fit[0], part.fit[1][:, o])
        expected = cp.predict_interval(part.test[0], [0.95, 0.975]).intervals
        found = regions["ACP-GN", "bonferroni"].intervals[..., o]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-6)  # outputs are float32
    # The rectangle around the ellipsoid, a ball here, touches it where one corner alone is off.
    la = fullcp.LaplaceRegressor(
        part.head,
        curvature="last_layer",
        l2=l2,
        noise=boxes.scalar_tuning(part.head, *part.fit).noise,
    ).fit(*part.fit)
    around = regions["LA", "ellipsoid"].intervals[:, :, 1]
    f = la.predict(part.test[0])
    for o in range(4):
        for factor, inside in ((1 - 1e-9, True), (1 + 1e-6, False)):
            label = f.clone()
            label[:, o] = f[:, o] + factor * (around[:, 1, o] - f[:, o])
            assert (la.ellipsoid_contains(part.test[0], label, 0.9)[:, 0] == inside).all()


def test_stages_apart_resume_and_refuse(done, tmp_path, monkeypatch):
    folder, rows = done
    monkeypatch.setattr(box_networks, "finetune", None)  # nothing is trained again
    monkeypatch.setattr(boxes, "load_trained", None)  # nor evaluated
    again = list(run(DATA, small_backbone, folder, plan=FINE, seeds=range(2), levels=LEVELS))
    assert again == rows
    with pytest.raises(ValueError, match="folder holds seed 0 trained with frozen=False; name another folder"):
        list(train_seeds(DATA, small_backbone, FROZEN, range(1), folder))
    other = drawn_boxes(400, size=24, seed=5)
    with pytest.raises(ValueError, match="folder holds seed 0 trained with other images"):
        list(train_seeds(other, small_backbone, FINE, range(1), folder))
    # Rows that are kept are handed out for the images and the plan of their networks alone.
    assert evaluate_seed(DATA.without_pixels(), folder, 0, plan=FINE, levels=LEVELS) == [r for r in rows if r.seed == 0]
    with pytest.raises(ValueError, match="folder holds seed 0 trained with other images"):
        evaluate_seed(other.without_pixels(), folder, 0, levels=LEVELS)
    longer = replace(FINE, recipe=replace(RECIPE, epochs=77), trunk=(9, 9))
    with pytest.raises(ValueError, match=r"seed 0 trained with trunk=\[24, 16\], epochs=18; name another folder"):
        evaluate_seed(DATA, folder, 0, plan=longer, levels=LEVELS)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match=r"seed 7 is not trained: .*seed_007.safetensors does not exist; run"):
        evaluate_seed(DATA, folder, 7, levels=LEVELS)
    with pytest.raises(ValueError, match="shares must lie between 0 and 1"):
        Plan(shares=(0.25, 1.0))


def test_kept_rows_of_other_networks_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "_EPOCHS", 3)
    short = replace(FROZEN, recipe=Recipe(epochs=2))
    networks = tmp_path / "seed_000.safetensors"
    list(train_seeds(DATA, small_backbone, short, range(1), tmp_path, device="cpu"))
    first = evaluate_seed(DATA, tmp_path, 0, plan=short)
    assert boxes.evaluated(tmp_path, 0, boxes.LEVELS) == first
    networks.unlink()  # a person begins again, with other epochs
    longer = replace(FROZEN, recipe=Recipe(epochs=3))
    list(train_seeds(DATA, small_backbone, longer, range(1), tmp_path, device="cpu"))
    assert boxes.evaluated(tmp_path, 0, boxes.LEVELS) == []
    again = evaluate_seed(DATA, tmp_path, 0, plan=longer)
    assert [r.volume for r in again] != [r.volume for r in first]
    held = json.loads((tmp_path / "seed_000.json").read_text())
    assert held["plan"] == longer.facts()
    assert held["images"] == DATA.digest() == DATA.without_pixels().digest()


def test_frozen_backbones_train_together_and_keep_their_features(tmp_path, monkeypatch):
    short = Plan(frozen=True, recipe=Recipe(epochs=3), trunk=(12, 8), pool=4)
    seeds = list(train_seeds(DATA, small_backbone, short, range(2), tmp_path, device="cpu"))
    assert seeds == [0, 1]
    plan, trained = load_trained(tmp_path, 1)
    assert plan == short
    assert list(trained) == [0.0, 0.25, 0.5]
    assert trained[0.25].z.shape == (400, 8)
    assert not torch.equal(trained[0.25].z, load_trained(tmp_path, 0)[1][0.25].z)
    kept = (tmp_path / "features.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(box_networks, "pooled_features", None)  # they are in the cache
    list(train_seeds(DATA, small_backbone, short, range(3), tmp_path, device="cpu"))
    assert (tmp_path / "features.safetensors").stat().st_mtime_ns == kept
    assert sorted(path.name for path in tmp_path.glob("seed_*")) == [f"seed_00{i}.safetensors" for i in range(3)]
    with pytest.raises(TypeError):  # another backbone: its features are not those of the cache
        list(train_seeds(DATA, lambda: small_backbone(seed=1), short, range(4), tmp_path, device="cpu"))


def test_splits_of_a_seed():
    sizes = []
    for share in (0.0, 0.25, 0.5):
        split = split_of(3686, 4, share)
        parts = [part.tolist() for part in (split.fit, split.cal, split.test)]
        assert sorted(parts[0] + parts[1] + parts[2]) == list(range(3686))
        assert torch.equal(split.test, split_of(3686, 4, 0.0).test)
        sizes.append([len(part) for part in parts])
    assert sizes == [[2949, 0, 737], [2212, 737, 737], [1475, 1474, 737]]
    assert not torch.equal(split_of(3686, 4, 0.0).test, split_of(3686, 5, 0.0).test)


def row(**changes):
    about = {"localization_error": 0.1, "mean_overlap": 0.7, "accuracy": 0.99, "train_seconds": 1.0, "seconds": 1.0}
    base = {"table": "bbox", "seed": 0, "method": "SCP", "joint": "max", "level": 0.9, "volume": 1.0, **about}
    more = {
        "share": 0.25,
        "device": "cpu",
        "commit": "0",
        "volume_in_image": 0.1,
        "coverage": 0.9,
        "infinite_share": 0.0,
        "rows": 737,
        "test_rows": 737,
    }
    return BoxRow(**{**base, **more, **changes})


def test_summaries():
    rows = [row(seed=i, volume=1.0 + i, coverage=0.88 + 0.01 * i) for i in range(3)]
    rows += [row(table="bbox_50", coverage=0.8), row(table="all", method="LA", coverage=0.95, rows=2949)]
    found = {(each["table"], each["method"]): each for each in summarise(rows)}
    assert set(found) == {("bbox", "SCP"), ("bbox_50", "SCP"), ("bbox", "LA"), ("bbox_50", "LA")}
    three = found["bbox", "SCP"]
    assert three["seeds"] == 3
    assert three["volume"] == pytest.approx(2.0)
    assert three["volume_se"] == pytest.approx(np.std([1, 2, 3], ddof=1) / 3**0.5)
    assert three["coverage"] == pytest.approx(0.89)
    assert (three["band_low"], three["band_high"]) == validity_band(737, 0.9)
    assert three["valid"]
    assert not found["bbox_50", "SCP"]["valid"]
    assert not found["bbox", "LA"]["valid"]


def test_views_and_pictures(done, tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "_EPOCHS", 5)
    folder, _ = done
    view = view_seed(DATA, folder, 1, level=0.9, share=0.25)
    assert set(view.regions) == {method for method, _ in KINDS}
    assert torch.equal(view.truth, DATA.boxes[view.rows])
    view.save(tmp_path / "view")
    loaded = View.load(tmp_path / "view")
    assert (loaded.seed, loaded.level) == (1, 0.9)
    for name, region in view.regions.items():
        assert torch.equal(loaded.regions[name], region)
        assert torch.equal(loaded.boxes[name], view.boxes[name])
        assert region.shape == (80, 2, 4)
        assert (region[:, 0] <= region[:, 1]).all()
    overlaps = view.overlaps("SCP")
    best, typical, worst = (overlaps[picks] for picks in view.best_typical_worst("SCP", 5))
    assert best.min() >= overlaps.sort().values[-5]
    assert worst.max() <= overlaps.sort().values[4]
    assert ((typical >= overlaps.quantile(0.4)) & (typical <= overlaps.quantile(0.6))).all()
    with pytest.raises(ValueError, match=r"share must be one of 0\.25, 0\.5, got 0\.4"):
        view_seed(DATA, folder, 1, share=0.4)
    figure = plots.box_methods_figure(DATA.images, view, rows=2)
    assert len(figure.axes) == 2 * len(view.regions)
    cases = plots.box_cases_figure(DATA.images, view, "SCP", count=4)
    assert [axes.get_ylabel() for axes in cases.axes[::4]] == ["best", "typical", "worst"]
    for each in (figure, cases):
        FigureCanvasAgg(each).draw()


def test_region_is_drawn_where_it_is():
    """Pixels: green between the largest and the smallest box, the image inside and outside, the prediction in red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 2), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    white = np.full((3, 10, 10), 255, np.uint8)
    region = [[0.1, 0.1, 0.7, 0.7], [0.3, 0.3, 0.9, 0.9]]
    plots.box_region(axes, white, [0.2, 0.2, 0.8, 0.8], region)
    axes.set_frame_on(False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3] / 255

    def at(x, y):
        return pixels[int(200 * y), int(200 * x)]

    green = 0.65 + 0.35 * np.array(to_rgb(plots.GREEN))
    np.testing.assert_allclose(at(0.5, 0.25), green, atol=0.02)
    np.testing.assert_allclose(at(0.15, 0.5), green, atol=0.02)
    np.testing.assert_allclose(at(0.85, 0.86), green, atol=0.02)
    np.testing.assert_allclose(at(0.5, 0.5), 1.0, atol=0.01)
    np.testing.assert_allclose(at(0.05, 0.5), 1.0, atol=0.01)
    np.testing.assert_allclose(at(0.2, 0.5), to_rgb(plots.RED), atol=0.1)


def command(*arguments, folder):
    line = [sys.executable, "-W", "ignore", "-m", "fullcp", "boxes", *arguments]
    # Without the data sets: with images and weights at hand a command would train for hours.
    env = {name: value for name, value in os.environ.items() if name != "FULLCP_DATA"}
    return subprocess.run(line, capture_output=True, text=True, cwd=folder, env=env, check=False, timeout=300)


def test_the_tables_of_the_paper_by_one_request(tmp_path, monkeypatch):
    """`fullcp reproduce --table bbox`, on drawn images in place of photographs."""
    monkeypatch.setattr(box_tables, "read_images", lambda images: DATA)
    monkeypatch.setattr(box_tables, "read_backbone", lambda weights: small_backbone())
    monkeypatch.setattr(box_tables, "balanced", lambda backbone, data, device: lambda: backbone)
    monkeypatch.setattr(box_tables.Photographs, "plan", lambda self, epochs: replace(FROZEN, recipe=Recipe(epochs=4)))
    monkeypatch.setattr(boxes, "_EPOCHS", 5)
    nothing = dict.fromkeys(("datasets", "methods", "epochs"))
    where = {"device": "cpu", "memory": "1GB", "run_dir": tmp_path / "runs", "output": tmp_path / "results"}
    photographs = box_tables.Photographs(frozen=True)
    said = []

    def ask(stage, **changes):
        asked = {"tables": box_tables.TABLES, "seeds": 2, "photographs": photographs, "stage": stage}
        reproduction.run(reproduction.Request(**{**nothing, **where, **asked, **changes}), said.append)

    ask("write")
    assert said == [f"{name}: nothing is evaluated of it yet" for name in box_tables.FROZEN]
    with pytest.raises(FileNotFoundError, match="boxes_frozen holds no trained seed: run the training stage first"):
        ask("evaluate")
    ask("train")
    ask("evaluate", seeds=3)
    assert said[-1] == "boxes: seeds 2 are not trained, and are left out"
    # What is written says what was trained, not what the command line says now.
    short = box_tables.Photographs.plan
    monkeypatch.setattr(box_tables.Photographs, "plan", lambda self, epochs: replace(FROZEN, recipe=Recipe(epochs=200)))
    with pytest.raises(ValueError, match="seed 0 trained with epochs=4; name another folder, or ask for the same"):
        ask("evaluate")
    ask("write")
    monkeypatch.setattr(box_tables.Photographs, "plan", short)
    rows = {name: read_rows(tmp_path / "results" / f"{name}.csv") for name in box_tables.FROZEN}
    seeds = [
        row for seed in range(2) for row in boxes.evaluated(tmp_path / "runs" / "boxes_frozen", seed, boxes.LEVELS)
    ]
    for name, share in zip(box_tables.FROZEN, ("25", "50")):
        assert len(rows[name]) == 3 * len(KINDS)
        for row in rows[name]:
            method, joint = row["method"].removesuffix(", max"), "max" if row["method"].endswith(", max") else None
            own = [
                r
                for r in seeds
                if r.method == method
                and (r.joint == "max") == (joint == "max")
                and r.level == float(row["level"]) / 100
                and r.table in (name.removesuffix("_frozen"), "all")
            ]
            assert float(row["size"]) == pytest.approx(100 * np.mean([r.volume for r in own]), rel=1e-5)
            if np.isfinite(float(row["size"])):
                error = np.std([r.volume for r in own], ddof=1) / 2**0.5
                assert float(row["size_se"]) == pytest.approx(100 * error, rel=0.01, abs=1e-9)
            assert float(row["coverage"]) == pytest.approx(100 * np.mean([r.coverage for r in own]), abs=1e-3)
            assert row["calibration"] == ("0" if method in ("ACP-GN", "LA", "jackknife+") else share)
            assert (
                row["command"]
                == f"fullcp reproduce --table {name.removesuffix('_frozen')} --frozen --epochs 4 --seeds 2"
            )
    (cost,) = read_rows(tmp_path / "results" / "training.csv", TRAINING_COLUMNS)
    assert (cost["dataset"], cost["networks"], cost["roles"]) == ("boxes_frozen", "6", "full fit-25 fit-50")
    assert cost["epochs"] == "4"
    assert {row["seeds"] for row in rows["bbox_frozen"]} == {"0 to 1"}
    # Seeds with a hole between them are named one by one.
    ask("all", seeds=4)
    (tmp_path / "runs" / "boxes_frozen" / "seed_001.safetensors").unlink()
    ask("write", seeds=4, output=tmp_path / "holes")
    (first, *_) = read_rows(tmp_path / "holes" / "bbox_frozen.csv")
    assert (first["repeats"], first["seeds"], first["command"][-9:]) == ("3", "0, 2, 3", "--seeds 4")
    with pytest.raises(ValueError, match="methods: tables of boxes"):
        ask("write", methods=("SCP",))


def test_weights_that_are_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLCP_DATA", str(tmp_path))
    with pytest.raises(OSError, match=rf"weights of VGG-19 are missing.*which is {tmp_path}"):
        box_tables.read_backbone(None)
    monkeypatch.delenv("FULLCP_DATA")
    with pytest.raises(OSError, match="weights of VGG-19 are missing"):
        box_tables.read_backbone(None)


def test_command(tmp_path):
    options = ("--drawn", "150", "--seeds", "1", "--epochs", "4", "--trunk", "12", "--frozen")
    ran = command(*options, "--stage", "train", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "seed 0 is trained" in ran.stdout
    ran = command(*options, "--stage", "evaluate", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "ACP-GN (split + refine), max" in ran.stdout
    names = {path.name for path in (tmp_path / "boxes_output").iterdir()}
    assert {"boxes.csv", "boxes_seeds.csv", "boxes_methods.png", "boxes_cases.png", "plan.json"} <= names
    with open(tmp_path / "boxes_output" / "boxes.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * len(KINDS)
    plan = (tmp_path / "boxes_output" / "plan.json").read_text()
    other = ("--drawn", "90", "--seeds", "1", "--epochs", "77", "--trunk", "9", "--frozen", "--stage", "evaluate")
    ran = command(*other, folder=tmp_path)
    assert ran.returncode == 2
    assert "epochs=4" in ran.stderr
    assert "other images" in ran.stderr
    assert (tmp_path / "boxes_output" / "plan.json").read_text() == plan
    ran = command("--images", "nothing", "--stage", "evaluate", folder=tmp_path)  # weights are not asked for
    assert ran.returncode == 2
    assert "folder has no images in it" in ran.stderr
    ran = command(*options, "--learning-rate", "1e6", "--output", "diverged", folder=tmp_path)
    assert ran.returncode == 1
    assert "diverged in epoch" in ran.stdout
    assert "Traceback" not in ran.stderr
    ran = command("--output", "nowhere", folder=tmp_path)
    assert ran.returncode == 2
    assert "--weights" in ran.stderr
    ran = command("--weights", "nothing.pth", folder=tmp_path)
    assert ran.returncode == 2
    assert "nothing.pth" in ran.stderr
    assert command("--drawn", "80", "--stage", "half", folder=tmp_path).returncode == 2
