"""FedSGD: each round is one gradient over the silos' records, and one step of the server.

Source: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, Communication-Efficient Learning of Deep Networks
from Decentralized Data, AISTATS 2017, section 2, where a batch is all of a silo's records. With n_k silo k's
number of records, F_k its mean loss and n the sum of the n_k::

    g = sum_k (n_k / n) grad F_k(w),      w <- w - eta g

which is a step of gradient descent on the pooled records. The server may put momentum or Adam in place of
this step, and a silo may draw a part of its records in each round.

Under differential privacy g is one bounded sum, and silos can share its noise: it is then DP-SGD (Abadi et
al., CCS 2016) on the records of all silos together. Kairouz, Liu and Steinke, The Distributed Discrete
Gaussian Mechanism for Federated Learning with Secure Aggregation, ICML 2021.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from tightframe.learning import model_update
from tightframe.learning.gradients.sharing import check_one_step, gradient_phase
from tightframe.learning.halves import plain_training, train
from tightframe.learning.server_optimizers import GradientDescent
from tightframe.options import StrictModel
from tightframe.phases import Method, Phase, ServerState, Setting, SiloView, Tensors


class FedSGDConfig(StrictModel):
    """FedSGD's options. The optimiser of a job's ``training`` section serves personal models only.

    Attributes:
        optimizer: of the server.
        learning_rate: eta, for clipped gradients; without privacy begin with 0.1 (on a frozen encoder with
            ``adam``), with ``adam`` and privacy with 0.03.
        momentum: of ``sgd``.
        beta1, beta2, eps: of ``adam``.
        weight_decay: coupled L2.
        sampling_rate: the part of its records that each silo draws in a round, and under privacy the
            probability with which it draws each record, or patient; 1 takes all.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = Field(default=1.0, gt=0, le=1000)
    momentum: float = Field(default=0.5, ge=0, lt=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    sampling_rate: float = Field(default=1.0, gt=0, le=1)

    @property
    def server(self) -> GradientDescent:
        """The server's optimiser."""
        return GradientDescent(
            self.optimizer,
            self.learning_rate,
            momentum=self.momentum,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


def init_server(setting: Setting, seed: int) -> ServerState:
    """Return the model that ``seed`` gives, before the first step."""
    return ServerState(model_update.initial_model(setting, seed), setting.config.server.initial())


def plan(setting: Setting, round: int, rounds: int) -> tuple[Phase, ...]:
    """Return the round's one sum.

    Raises:
        ValueError: if the job's other values do not fit this method.
    """
    problems = check_one_step(setting, digits="gradients are summed as they are")
    if setting.privacy is not None and setting.update_norm is not None:
        problems.append(
            "no update_norm with privacy, where each record's gradient is clipped (privacy.clip_norm): "
            "shortening a silo's noisy sum would take away noise that other silos rely on"
        )
    if problems:
        raise ValueError("Expected " + "; ".join(problems) + ".")
    config: FedSGDConfig = setting.config
    return (gradient_phase(setting, config.server, weighted=True, share=config.sampling_rate),)


def personalise(silo: SiloView, tensors: Tensors, state: Tensors) -> nn.Module:
    """Return the final model after one epoch of plain local training, as the job's ``training`` says."""
    return train(silo, model_update.broadcast_model(tensors), state, plain_training()).model


METHOD = Method(
    name="fedsgd",
    title="FedSGD",
    paper=(
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, "
        "AISTATS 2017"
    ),
    counts_rounds=False,
    config=FedSGDConfig,
    findings=lambda config: None,
    init_server=init_server,
    plan=plan,
    private=lambda config: None,
    gradient_rate=lambda config: float(config.sampling_rate),
    personalise=personalise,
    rounded=True,
)
