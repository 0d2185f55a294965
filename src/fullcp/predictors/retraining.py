"""What exact full conformal prediction costs: a network trained anew for every test point with every label.

All of them train as ensembles that fill the device; what is known is remembered, and written to a file if one is
named, so that neither another level nor an interruption costs a second training.
"""

from __future__ import annotations

import copy
import hashlib
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fullcp.candidates import count_tails
from fullcp.files import read_file, write_file
from fullcp.memory import rows_within
from fullcp.progress import track
from fullcp.training.build import build_stack
from fullcp.training.checkpoint import read_path
from fullcp.training.identity import identity
from fullcp.training.losses import SquaredLoss
from fullcp.training.pool import Pool
from fullcp.training.run import Recipe, Run
from fullcp.training.threads import one_thread_if_small

_EVERY = 10.0  # seconds between two writings of the file
_MOST = {"cpu": 512, "cuda": 8192}  # networks at once: progress and the file move in steps of these


class Retraining:
    """How the residuals of N + 1 rows compare after training on them, for any new row and label.

    Parameters
    ----------
    initial : a module with the weights that every training starts from.
    x, y : Tensor (N, ...) and (N,)
        The training rows.
    l2 : Tensor (P,)
    recipe, seed : how to train.
    residuals : "absolute" or "signed"
    memory : budget in bytes.
    checkpoint : a file for what is known.
    """

    def __init__(
        self,
        initial: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        l2: Tensor,
        recipe: Recipe,
        seed: int,
        residuals: str,
        memory: int,
        checkpoint: str | Path | None,
    ):
        self.initial, self.x, self.y = initial, x, y
        self.l2, self.recipe, self.seed, self.residuals = l2, recipe, seed, residuals
        self.memory = memory
        self._known: dict[bytes, tuple[int, ...]] = {}  # a row with a label -> its tails
        self._file = None if checkpoint is None else read_path(checkpoint)
        if self._file is not None:
            self._read()

    def tails(self, x: Tensor, labels: Tensor) -> Tensor:
        """Tails (T, m, K) for rows x (m, ...) with labels (m, K), see `fullcp.candidates`."""
        m, K = labels.shape
        keys = _keys(x, labels)
        wanted: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if key not in self._known:
                wanted.setdefault(key, place)
        places = list(wanted.values())
        size = self._at_once()
        chunks = [places[start : start + size] for start in range(0, len(places), size)]
        last = time.monotonic()
        for chunk in track(chunks, "retraining", len(chunks)):
            at = torch.tensor(chunk, device=x.device)
            found = self._train(x[at // K], labels.flatten()[at])
            self._known.update({keys[place]: tuple(row) for place, row in zip(chunk, found.T.tolist(), strict=True)})
            if self._file is not None and (time.monotonic() - last > _EVERY or chunk is chunks[-1]):
                self._write()
                last = time.monotonic()
        rows = [self._known[key] for key in keys]
        return torch.tensor(rows, device=x.device).T.reshape(-1, m, K)

    def _train(self, x: Tensor, labels: Tensor) -> Tensor:
        """Tails (T, B) of networks trained on the training rows and one row x[b] with labels[b] each."""
        N, B = len(self.x), len(x)
        dtype = next(self.initial.parameters()).dtype
        own = torch.arange(N, N + B, device=x.device).unsqueeze(1)
        rows = torch.cat([torch.arange(N, device=x.device).expand(B, N), own], dim=1)
        targets = torch.cat([self.y, labels])
        pool = Pool(torch.cat([self.x, x]), targets.to(dtype).unsqueeze(1), rows, torch.full_like(rows[:, 0], N + 1))
        stack = build_stack([self.initial] * B, self.x)
        run = Run(
            stack,
            pool,
            loss=SquaredLoss(),
            l2=self.l2.expand(B, -1).clone(),
            noise=torch.ones(B, dtype=torch.float64, device=x.device),
            recipe=self.recipe,
            seeds=torch.full((B,), self.seed, device=x.device),
        )
        with one_thread_if_small(B * min(N + 1, self.recipe.batch_size) * stack.size):
            while not run.finished:
                run.advance()
        lost = [b for b in range(B) if run.outcomes[b].divergence is not None]
        if lost:
            raise ValueError(
                f"training diverged with the label {labels[lost[0]].item():.6g} added: "
                f"{run.outcomes[lost[0]].divergence}; a smaller learning_rate helps, or standardised data"
            )
        f = run.stack.predict(pool.x[rows])[..., 0]
        e = targets[rows] - f.double()
        return count_tails(e[:, :N], e[:, N], self.residuals)

    def _at_once(self) -> int:
        """How many networks train together."""
        N = len(self.x)
        dtype = next(self.initial.parameters())
        row = 2 * self.x[0].numel() * self.x.element_size() + 40
        each = 8 * len(self.l2) * dtype.element_size() + 8 * len(self.l2) + (N + 1) * row
        return rows_within(self.memory // 2, each, at_most=_MOST.get(self.x.device.type, 512))

    # The file

    def _read(self) -> None:
        assert self._file is not None
        if not self._file.exists():
            return
        header, tensors = read_file(self._file, torch.device("cpu"))
        if header.get("kind") != "retraining" or header["key"] != self._key():
            raise ValueError(
                f"checkpoint holds other retrainings: network, data or settings differ. Delete it or name another "
                f"file: {self._file}"
            )
        keys = tensors["keys"].numpy().tobytes()
        width = len(keys) // max(1, len(tensors["tails"]))
        for i, row in enumerate(tensors["tails"].tolist()):
            self._known[keys[i * width : (i + 1) * width]] = tuple(row)

    def _write(self) -> None:
        assert self._file is not None
        keys = np.frombuffer(b"".join(self._known), dtype=np.uint8).copy()
        tails = torch.tensor(list(self._known.values()))
        write_file(
            self._file, {"keys": torch.from_numpy(keys), "tails": tails}, {"kind": "retraining", "key": self._key()}
        )

    def _key(self) -> str:
        """A hash of all that decides how a training goes."""
        return identity([self.recipe, self.seed, self.residuals, self.initial, self.x, self.y, self.l2])


def fresh(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a network with new initial weights, drawn by its own layers; torch's random state is left alone."""
    untrained = copy.deepcopy(model).cpu()
    reset: set[int] = set()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in untrained.modules():
            reset_parameters = getattr(module, "reset_parameters", None)
            if callable(reset_parameters):
                reset_parameters()
                reset |= {id(p) for p in module.parameters()}
    missing = [name for name, p in untrained.named_parameters() if p.requires_grad and id(p) not in reset]
    if missing:
        raise ValueError(
            f"model has parameters that no reset_parameters() initialises ({', '.join(missing[:5])}): nobody knows "
            "their fresh values; give the module that method, or pass start='trained'"
        )
    devices = {p.device for p in model.parameters()}
    return untrained.to(devices.pop())


def _keys(x: Tensor, labels: Tensor) -> list[bytes]:
    """What identifies each row with each label, row by row."""
    rows = [hashlib.sha256(_bytes(row)).digest()[:16] for row in x.cpu()]
    columns = labels.double().cpu().numpy()
    return [row + label.tobytes() for row, own in zip(rows, columns, strict=True) for label in own]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()
