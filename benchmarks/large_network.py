"""Exact full conformal prediction for a residual network of 11 million parameters, whose gradients no memory holds.

    python benchmarks/large_network.py                 # N = 5,000 on a CUDA device, 200 on a CPU (some minutes there)
    python benchmarks/large_network.py --rows 1000 --memory 20GB
    python benchmarks/large_network.py --rows 5000 --side 8 --memory 12GB   # on a CPU: more than an hour of one core

Seconds for `conformalize` and for the intervals of 100 test points, the peak of the memory, and both as shares of their
bound: the products that the kernel takes, at the measured rate of a large float64 product. Results go to
results/benchmark_large_network.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import fullcp

ROOT = Path(__file__).resolve().parent.parent


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.a = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b, self.relu = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride > 1 or inside != outside:
            self.shortcut.append(nn.Conv2d(inside, outside, 1, stride, bias=False)).append(nn.BatchNorm2d(outside))

    def forward(self, x):
        """Z + shortcut."""
        z = self.norm_b(self.b(self.relu(self.norm_a(self.a(x)))))
        return self.relu(z + self.shortcut(x))


def resnet18(outputs=1):
    """ResNet-18 as it is used for images of 32 x 32 and smaller, 11.2 million parameters (He et al., 2016)."""
    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))


def seconds(device, function):
    """Seconds that a call takes, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def rate_of_products(device):
    """Multiplications a second in the best of several large float64 products."""
    n, c = (4096, 16384) if device.type == "cuda" else (512, 8192)
    P, K = torch.randn(n, c, device=device, dtype=torch.float64), torch.zeros(n, n, device=device, dtype=torch.float64)
    return n * n * c / min(seconds(device, lambda: K.addmm_(P, P.T))[0] for _ in range(6))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--outputs", type=int, default=1)
    parser.add_argument("--side", type=int, default=32, help="of the square images, in pixels")
    parser.add_argument("--memory")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmark_large_network.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # nobody trained the network: it is far from its minimum
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    rows = arguments.rows or (5000 if on_gpu else 200)
    memory = arguments.memory or ("60GB" if on_gpu else "4GB")
    torch.manual_seed(0)
    model = resnet18(arguments.outputs).to(device)
    X = torch.randn(rows + arguments.points, 3, arguments.side, arguments.side, device=device)
    with torch.no_grad():
        model(X[:100])  # gives BatchNorm its running statistics
        y = torch.randn(rows, arguments.outputs, device=device)
    model.eval()
    rate = rate_of_products(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    # The square of a gradient is some 1e4; with l2 = 1, kernels are that many times l2.
    cp = fullcp.FullConformalRegressor(model, l2=1.0, memory=memory)
    processor = time.process_time()
    fit, _ = seconds(device, lambda: cp.conformalize(X[:rows], y[:, 0] if arguments.outputs == 1 else y))
    processor = time.process_time() - processor
    predict, intervals = seconds(device, lambda: cp.predict_interval(X[rows:], [0.9, 0.95]).intervals)
    assert cp.curvature_.name == "full, kernels"
    assert intervals.isfinite().all()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    kernels = cp.curvature_.rows
    one_pass, _ = seconds(device, lambda: [kernels.look(X[at]) for at in kernels.slices])
    bound_fit = kernels.operations(rows, rows) / 2 / rate  # of a symmetric matrix, one half
    bound_predict = kernels.operations(rows, arguments.points) / rate
    D = sum(p.numel() for p in model.parameters())
    report = {
        "command": "python benchmarks/large_network.py " + " ".join(sys.argv[1:]),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT,
                                 check=False).stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s)" + (f", {torch.cuda.get_device_name()}" if on_gpu else ""),
        "parameters": D,
        "images": f"3 x {arguments.side} x {arguments.side}",
        "rows": rows,
        "outputs": arguments.outputs,
        "memory": memory,
        "gradients_gb": round(4e-9 * rows * arguments.outputs * D, 1),
        "kept_gb": round(1e-9 * rows * kernels.bytes_per_row, 2),
        "blocks_of_rows": len(kernels.slices),
        "conformalize_s": round(fit, 2),
        "conformalize_processor_s": round(processor, 2),  # less than the former on a machine that others use
        "points": arguments.points,
        "predict_s": round(predict, 2),
        "one_pass_over_the_rows_s": round(one_pass, 2),
        "peak_gb": round(1e-9 * peak, 2),
        "float64_products_tflops": round(2e-12 * rate, 3),
        "bound_conformalize_s": round(bound_fit, 2),
        "share_of_bound_conformalize": round(bound_fit / fit, 3),
        "bound_predict_s": round(bound_predict, 3),
        "share_of_bound_predict": round(bound_predict / predict, 3),
    }  # fmt: skip
    text = json.dumps(report, indent=2)
    print(text)
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
