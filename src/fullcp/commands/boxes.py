"""The command `fullcp boxes`: trains detectors of boxes, makes regions of them, prints tables and draws pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullcp.commands.app import app, console

if TYPE_CHECKING:
    from torch import nn

    from fullcp.data import BoxImages

_STAGES = ("all", "train", "evaluate")


@app.command()
def boxes(
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of the Oxford-IIIT Pet data, or a packed file; without it FULLCP_DATA is looked in."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights of VGG-19: safetensors, or torchvision's file; FULLCP_DATA is looked in."),
    ] = None,
    drawn: Annotated[
        int, typer.Option(min=0, help="Draw this many small images in place of photographs; a tiny network is trained.")
    ] = 0,
    output: Annotated[Path, typer.Option(help="Folder for networks, tables and pictures.")] = Path("boxes_output"),
    seeds: Annotated[int, typer.Option(min=1, help="How many random splits.")] = 20,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Leave the backbone as it is, and train heads on its features.")
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs; the paper takes 200.")] = 200,
    learning_rate: Annotated[float, typer.Option(help="The largest learning rate.")] = 1e-2,
    trunk: Annotated[int, typer.Option(min=1, help="Width of the two fully connected layers.")] = 4096,
    stage: Annotated[
        str, typer.Option(help="all, train (networks alone) or evaluate (what is trained already).")
    ] = "all",
    device: Annotated[
        str | None, typer.Option(help="Such as cuda or cpu; without it a GPU where there is one.")
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Draw pictures of the first seed.")] = True,
) -> None:
    """Regions for the boxes around faces of cats and dogs: seven methods, as in the paper's second experiment."""
    from fullcp.experiments.box_networks import Plan, train_seeds, training_facts
    from fullcp.experiments.box_views import view_seed
    from fullcp.experiments.boxes import evaluate_seed, summarise
    from fullcp.report import write_csv
    from fullcp.vision import DivergedError, Recipe

    if stage not in _STAGES:
        raise typer.BadParameter(f"must be one of {', '.join(_STAGES)}, got {stage!r}", param_hint="--stage")
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; a folder is wanted", param_hint="--output")
    try:
        recipe = Recipe(epochs=epochs, learning_rate=learning_rate)
        plan = Plan(
            frozen=frozen,
            recipe=recipe,
            trunk=(trunk, trunk),
            dropout=0.0 if drawn else 0.5,
            pool=8 if drawn else 7,
        )
        trains = stage != "evaluate"  # intervals need no backbone, and so no weights of one
        data, backbone = _drawn(drawn) if drawn else _photographs(images, weights, trains=trains)
        if trains:
            for seed in train_seeds(data, backbone, plan, range(seeds), output, device=device):
                console.print(f"seed {seed} is trained", highlight=False)
        if stage == "train":
            return
        rows = []
        for seed in range(seeds):
            rows += evaluate_seed(data, output, seed, plan=plan, device=device or _best_device())
        view = view_seed(data, output, 0, device=device or _best_device()) if pictures else None
    except DivergedError as error:
        console.print(f"fullcp: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(1) from error
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    summary = summarise(rows)
    write_csv(output / "boxes_seeds.csv", [row.as_dict() for row in rows])
    write_csv(output / "boxes.csv", summary)
    (output / "plan.json").write_text(json.dumps(training_facts(output, 0)["plan"], indent=2) + "\n")
    print_summary(summary)
    if view is not None:
        view.save(output / "view.safetensors")
        draw(data, view, output)


def print_summary(summary: list[dict[str, Any]]) -> None:
    """Two tables a share of calibration rows, volumes and joint coverage, with standard errors."""
    from fullcp.report import print_table

    for table in dict.fromkeys(row["table"] for row in summary):
        mine = [row for row in summary if row["table"] == table]
        levels = [f"{level:.0%}" for level in dict.fromkeys(row["level"] for row in mine)]
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in mine:
            groups.setdefault(row["method"] + (", max" if row["joint"] == "max" else ""), []).append(row)
        volumes = [
            [name, *(_number(row["volume"], row["volume_se"], 2) for row in group)] for name, group in groups.items()
        ]
        coverages = [[name, *(_coverage(row) for row in group)] for name, group in groups.items()]
        seeds = f"{table}, {mine[0]['seeds']} seed(s)"
        print_table(f"{seeds}: mean volume in standardised units", ["", *levels], volumes, console=console)
        title = f"{seeds}: joint coverage (%; x: outside the band)"
        print_table(title, ["", *levels], coverages, console=console)


def draw(data: BoxImages, view: Any, folder: Path) -> list[Path]:
    """Both pictures of a view."""
    from fullcp import plots

    methods = [name for name in view.regions if "own l2" not in name]
    paths = [folder / "boxes_methods.png", folder / "boxes_cases.png"]
    plots.box_methods_figure(data.images, view, methods=methods).savefig(paths[0], dpi=130)
    plots.box_cases_figure(data.images, view, "ACP-GN (split + refine)").savefig(paths[1], dpi=130)
    console.print(f"Wrote {paths[0]} and {paths[1]}", highlight=False, soft_wrap=True)
    return paths


def _photographs(
    images: Path | None, weights: Path | None, *, trains: bool
) -> tuple[BoxImages, Callable[[], nn.Module]]:
    from fullcp.experiments.box_tables import balanced, read_backbone, read_images
    from fullcp.vision import small_backbone

    if not trains:
        return read_images(images), small_backbone
    backbone = read_backbone(weights)  # before images are read, which takes longer
    data = read_images(images)
    return data, balanced(backbone, data, _best_device())


def _drawn(count: int) -> tuple[BoxImages, Callable[[], nn.Module]]:
    from fullcp.data import drawn_boxes
    from fullcp.vision import small_backbone

    return drawn_boxes(max(count, 60), size=32), small_backbone


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _number(mean: float, error: float, digits: int) -> str:
    return f"{mean:.{digits}f}" if error != error else f"{mean:.{digits}f} ±{error:.{digits}f}"


def _coverage(row: dict[str, Any]) -> str:
    return _number(100 * row["coverage"], 100 * row["coverage_se"], 1) + ("" if row["valid"] else " x")
