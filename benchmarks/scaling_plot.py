"""The scaling part of results/benchmark_prediction_cpu.json as a picture, docs/images/scaling.png.

python benchmarks/scaling_plot.py

On a machine with a GPU, where `make bench` measures that, it is that of results/benchmark_prediction_cuda.json, as
scaling_cuda.png.
"""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from measure import RESULTS, ROOT

LABELS = {
    "N": "training rows N (D = 501)",
    "D": "parameters D (N = 40,000)",
    "points": "test points (N = 40,000, D = 501)",
}


def main():
    device, picture = ("cuda", "scaling_cuda.png") if torch.cuda.is_available() else ("cpu", "scaling.png")
    found = json.loads((RESULTS / f"benchmark_prediction_{device}.json").read_text())["scaling"]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, (name, label) in zip(axes, LABELS.items(), strict=True):
        rows = found[name]
        axis.plot([row[name] for row in rows], [row["ms_per_point"] for row in rows], "o-", color="#1f5a96")
        axis.set(xscale="log", yscale="log", xlabel=label)
        if name == "D":
            values = [row[name] for row in rows]
            axis.set_xticks(values, [str(value) for value in values])
            axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3, which="both", linewidth=0.5)
    axes[0].set_ylabel("ms a test point, three levels")
    figure.savefig(ROOT / "docs" / "images" / picture, dpi=150)


if __name__ == "__main__":
    main()
