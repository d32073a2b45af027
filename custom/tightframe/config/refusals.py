"""Reasons why a site refuses a job: rule, asked and required value, and the part that the lead may see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tightframe.errors import PolicyError

REFUSALS = "tightframe.refusals"
"""Message key of the refused rules that a site reports to the lead with the code."""
BELOW_POLICY = ("TF-614", "TF-625", "TF-626", "TF-628")
"""Codes with which a site may report refused rules."""
MAX_TOLD = 120
"""Longest asked or required value that a site reports to the lead, in characters."""
MAX_RULES = 64
"""Most rules of one site that the server records."""
BESIDE_RULES = ("privacy", "accepted_options", "contract", "training_loops")
"""Subjects of a refusal besides a policy's rules: the job's privacy, values of the site's entry."""
_RULE, _PLAIN = re.compile(r"[a-z_.]+"), re.compile(r"[\w.+\-\[\]' ]*")


@dataclass(frozen=True)
class Refusal:
    """One rule that a job does not meet.

    Attributes:
        rule: its name in the policy.
        asked: the value that the job asks for.
        required: the value that the policy requires.
        why: the reason, for the site's own log only; the lead does not see it.
    """

    rule: str
    asked: str
    required: str
    why: str = ""

    def __str__(self) -> str:
        """Return one line for the site's log."""
        reason = f": {self.why}" if self.why else ""
        verb = "allowed" if self.required.startswith("at most ") else "required"
        return f"{self.rule}: the job asks for {self.asked}, {self.required} is {verb}{reason}"


class BelowPolicyError(PolicyError):
    """A job asks for less than a site's policy requires (``BELOW_POLICY``); every such rule is listed.

    Args:
        refusals: the rules, each with the asked and the required value.
        shown_to_lead: whether the policy lets the lead see them; otherwise only the code leaves the site.
        before: the message's first line.
    """

    def __init__(
        self,
        refusals: Iterable[Refusal],
        *,
        shown_to_lead: bool,
        before: str = "the job asks for less than this site's policy requires:",
        code: str | None = None,
    ) -> None:
        self.refusals = tuple(refusals)
        self.shown_to_lead = shown_to_lead
        super().__init__(before + "\n" + "\n".join(f"  - {refusal}" for refusal in self.refusals), code=code)

    def outside(self) -> list[list[str]]:
        """Return each refusal's rule, asked and required value, if they may leave the site with the code."""
        if not self.shown_to_lead:
            return []
        return [[item.rule, item.asked[:MAX_TOLD], item.required[:MAX_TOLD]] for item in self.refusals]


def in_words(reported: object) -> tuple[str, ...]:
    """Describe the refused rules that a site reported, one line each; malformed ones are dropped.

    The text cannot control a terminal or pass for another site's, as a rule is a plain name, and a value of
    more than plain words is quoted.

    >>> in_words([["epsilon_cap", "8", "at most 4"], [chr(27), "", ""], "nonsense"])
    ('epsilon_cap: asked 8, required at most 4',)
    >>> in_words([["pins", "1); site-2 refused: TF-614", "[2]"], ["x: asked 1); site-2 refused", "", ""]])
    ('pins: asked "1); site-2 refused: TF-614", required [2]',)
    """
    items = reported[:MAX_RULES] if isinstance(reported, list) else []
    refusals = [item for item in items if _is_refusal(item)]
    return tuple(
        f"{rule}: asked {_value(asked)}, required {_value(required)}" for rule, asked, required in refusals
    )


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _is_refusal(item: object) -> bool:
    if not isinstance(item, list | tuple) or len(item) != 3:
        return False
    texts = all(isinstance(part, str) and part.isprintable() and len(part) <= MAX_TOLD for part in item)
    return texts and _RULE.fullmatch(item[0]) is not None
