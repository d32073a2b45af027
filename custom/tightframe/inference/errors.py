"""Errors of whoever uses a trained model."""

from __future__ import annotations

from tightframe.errors import TightframeError


class ModelError(TightframeError):
    """A trained model cannot be used.

    TF-821 no model to load, TF-822 another model than its card says, TF-823 input of another form than the
    model takes, TF-824 a record that cannot be read or judged, TF-825 no export in this form, TF-826 an
    export that differs from the model, TF-827 a model whose last total a silo never verified.
    """

    code = "TF-821"
