"""The profiles that a site's policy starts from, rule by rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

GivenModels = Literal["none", "accepted", "any"]
WeightRule = Literal["exact", "power_of_two", "uniform"]
Profile = Literal["strict", "standard", "research"]
ClearMetric = Literal["evaluation", "training", "personal"]
EpsilonShown = Literal["nothing", "range", "exact"]

CLEAR_METRICS: tuple[ClearMetric, ...] = get_args(ClearMetric)

_STANDARD: Mapping[str, Any] = {
    "require_secure_sum": True,
    "minimum_cohort": 3,
    "colluders": 1,
    "semi_honest_server": False,
    "weights": ("exact", "power_of_two", "uniform"),
    "max_weight_share": 0.6,
    "max_update_norm": 1000.0,
    "max_records": 10_000_000,
    "min_class_count": None,
    "class_rules_off": False,
    "allow_sign_split": False,
    "full_batches": False,
    "static_cohort": "enrolled",
    "pins": {},
    "pinned_only": False,
    "central_provisioning": False,
    "required_privacy": False,
    "epsilon_cap": 8.0,
    "delta_cap": 1e-5,
    "max_releases": 10,
    "charged_retries": 3,
    "neighbours": None,
    "private_noise": "shared",
    "epsilon_shown": "range",
    "clear_metrics": (),
    "max_evaluations": 11,
    "max_score_bins": 32,
    "min_test_count": 10,
    "min_answer_grid": 1.0,
    "min_withdrawn": 10,
    "records_per_feature": 2,
    "min_row_bits": 24,
    "given_models": "accepted",
    "allowed_methods": None,
    "allowed_submitters": None,
    "max_parameters": 50_000_000,
    "max_message_bytes": 2**30,
    "max_sites": 100,
    "max_rounds": 1000,
    "max_epochs": 500,
    "max_batch_values": 2**26,
    "signed_jobs": True,
    "tell_refusals": True,
    "egress_guard": True,
    "log_streaming": False,
}
PROFILES: Mapping[Profile, Mapping[str, Any]] = {
    "strict": {
        **_STANDARD,
        "minimum_cohort": 5,
        "weights": ("power_of_two", "uniform"),
        "max_weight_share": 0.5,
        "pinned_only": True,
        "required_privacy": True,
        "charged_retries": 1,
        "max_evaluations": 6,
        "min_test_count": 20,
        "min_withdrawn": 20,
        "records_per_feature": 4,
        "neighbours": "record",
    },
    "standard": _STANDARD,
    "research": {
        **_STANDARD,
        "require_secure_sum": False,
        "minimum_cohort": 1,
        "semi_honest_server": True,
        "max_weight_share": None,
        "max_update_norm": None,
        "class_rules_off": True,
        "allow_sign_split": True,
        "full_batches": True,
        "epsilon_cap": None,
        "delta_cap": None,
        "max_releases": None,
        "charged_retries": None,
        "clear_metrics": CLEAR_METRICS,
        "max_evaluations": None,
        "max_score_bins": None,
        "min_test_count": 1,
        "min_answer_grid": 0.0,
        "min_withdrawn": 1,
        "records_per_feature": 0,
        "min_row_bits": 0,
        "given_models": "any",
        "max_parameters": 100_000_000,
        "max_sites": None,
        "max_rounds": None,
        "max_epochs": None,
        "max_batch_values": None,
        "signed_jobs": False,
        "egress_guard": False,
    },
}
NO_LIMIT = frozenset(
    (
        "max_weight_share",
        "max_update_norm",
        "max_records",
        "min_class_count",
        "epsilon_cap",
        "delta_cap",
        "max_releases",
        "charged_retries",
        "neighbours",
        "max_evaluations",
        "max_score_bins",
        "allowed_methods",
        "allowed_submitters",
        "max_parameters",
        "max_message_bytes",
        "max_sites",
        "max_rounds",
        "max_epochs",
        "max_batch_values",
    )
)
"""Rules for which null in a site's file means no limit. For all others null keeps the profile's value."""
