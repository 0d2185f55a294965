"""Methods in two steps: a fit to the rows the network was trained on, then calibration on rows it has not seen."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fullcp.features import Network
from fullcp.inputs import Rows, check_columns, check_row_shape
from fullcp.predictors.base import NotFittedError, Predictor, kept_setting
from fullcp.predictors.fingerprint import Fingerprint
from fullcp.predictors.seen import row_marks, warn_if_seen


class TwoSteps(Predictor):
    """What such methods share: which settings took effect when, and which data may follow which."""

    _first_step: ClassVar[str] = "fit(X_train, y_train).conformalize"
    _settings_of_fit: ClassVar[tuple[str, ...]]
    _fit_marks: Tensor | None = None  # of the rows of the fit; a predictor that was loaded does not know them

    def _end_fit(self, network: Network, rows: Rows, fingerprint: Fingerprint) -> None:
        """Remember what was fitted to; a calibration that rests on an earlier fit holds no longer."""
        if hasattr(self, "network_"):
            del self.network_
        self._fit_network, self._fit_fingerprint, self._fit_columns = network, fingerprint, rows.columns
        self._fit_marks = row_marks(rows)
        self._fit_settings = {name: kept_setting(getattr(self, name)) for name in self._settings_of_fit}

    def _read_calibration(self, X: object, y: object) -> Rows:
        """Calibration rows like those of the fit, of which the network must be the same."""
        if not hasattr(self, "_fit_network"):
            raise NotFittedError(f"{type(self).__name__}: call fit(X_train, y_train) before conformalize")
        if not self._fit_fingerprint.matches(self.model):
            raise NotFittedError(f"{type(self).__name__}: the model has changed since fit; call fit again")
        rows = self._read_data(X, y)
        check_row_shape(rows.x, self._fit_network.row_shape)
        check_columns(rows.columns, self._fit_columns)
        if self._fit_marks is not None:
            warn_if_seen(self._fit_marks, rows)
        return rows

    def _earlier_settings(self) -> dict[str, Any]:
        return self._fit_settings

    def _loaded_settings(self) -> dict[str, Any]:
        """Those of the fit, in a predictor that was loaded: the constructor was given them."""
        return {name: getattr(self, name) for name in self._settings_of_fit}
