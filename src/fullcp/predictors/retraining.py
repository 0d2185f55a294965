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
from fullcp.training.run import Divergence, Recipe, Run
from fullcp.training.threads import one_thread_if_small

_EVERY = 10.0  # seconds between two writings of the file
# Networks at once: progress and the file move in steps of these. On a CPU, 50 networks 1-100-1 with 501 rows and 500
# epochs take 5.8 s, which are 3.8e9 products of a row and a weight; a GPU is filled by thousands of networks only.
_MOST = {"cpu": 512, "cuda": 8192}
_LEAST = 16  # fewer together are not much faster than one by one
_WORK = 3e9  # rows x weights x epochs of a chunk on a CPU: about 5 s


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
        self._unwritten, self._last = False, time.monotonic()
        if self._file is not None:
            self._read()

    def tails(self, x: Tensor, labels: Tensor) -> Tensor:
        """Tails (T, m, K) for rows x (m, ...) with labels (m, K), see `fullcp.candidates`.

        What was trained is remembered, and written, also where an interruption or a label that diverges ends the work.
        """
        m, K = labels.shape
        keys = _keys(x, labels)
        wanted: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if key not in self._known:
                wanted.setdefault(key, place)
        places = list(wanted.values())
        size = self._at_once()
        chunks = [places[start : start + size] for start in range(0, len(places), size)]
        try:
            for chunk in track(chunks, "retraining", len(chunks)):
                at = torch.tensor(chunk, device=x.device)
                found, lost = self._train(x[at // K], labels.flatten()[at])
                tails = zip(chunk, found.T.tolist(), strict=True)
                known = {keys[place]: tuple(row) for b, (place, row) in enumerate(tails) if b not in lost}
                self._remember(known)
                if lost:
                    b, divergence = next(iter(lost.items()))
                    raise ValueError(
                        f"training diverged with the label {labels.flatten()[chunk[b]].item():.6g} added: "
                        f"{divergence}; a smaller learning_rate helps, or standardised data"
                    )
        finally:
            self._write()
        rows = [self._known[key] for key in keys]
        return torch.tensor(rows, device=x.device).T.reshape(-1, m, K)

    def _remember(self, found: dict[bytes, tuple[int, ...]]) -> None:
        """Take up what was trained, and write it if some seconds have passed."""
        self._known.update(found)
        self._unwritten = self._unwritten or bool(found)
        if time.monotonic() - self._last > _EVERY:
            self._write()

    def _train(self, x: Tensor, labels: Tensor) -> tuple[Tensor, dict[int, Divergence]]:
        """Tails (T, B) of networks trained on the training rows and one row x[b] with labels[b] each.

        With them, which of the networks diverged: what stands in their columns means nothing.
        """
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
        outcomes = [run.outcomes[b] for b in range(B)]
        lost = {b: outcome.divergence for b, outcome in enumerate(outcomes) if outcome.divergence is not None}
        e = torch.zeros(B, N + 1, dtype=torch.float64, device=x.device)
        kept = [b for b in range(B) if b not in lost]
        if kept:  # those that diverged have left the stack
            at = torch.tensor(kept, device=x.device)
            e[at] = targets[rows[at]] - run.stack.predict(pool.x[rows[at]])[..., 0].double()
        return count_tails(e[:, :N], e[:, N], self.residuals), lost

    def _at_once(self) -> int:
        """How many networks train together: what fits into memory, and on a CPU takes some seconds."""
        N = len(self.x)
        dtype = next(self.initial.parameters())
        row = 2 * self.x[0].numel() * self.x.element_size() + 40
        each = 8 * len(self.l2) * dtype.element_size() + 8 * len(self.l2) + (N + 1) * row
        most = _MOST.get(self.x.device.type, 512)
        if self.x.device.type == "cpu":
            most = min(most, max(_LEAST, int(_WORK / ((N + 1) * len(self.l2) * self.recipe.epochs))))
        return rows_within(self.memory // 2, each, at_most=most)

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
        if self._file is None or not self._unwritten:
            return
        keys = np.frombuffer(b"".join(self._known), dtype=np.uint8).copy()
        tails = torch.tensor(list(self._known.values()))
        write_file(
            self._file, {"keys": torch.from_numpy(keys), "tails": tails}, {"kind": "retraining", "key": self._key()}
        )
        self._unwritten, self._last = False, time.monotonic()

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
