"""What a site refuses a job for: rule, asked and required value, and what of it the lead may see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tightframe.errors import PolicyError

REFUSALS = "tightframe.refusals"
"""Key of what a refusal tells the lead, beside its code, in what travels."""
MAX_TOLD = 120
"""Characters of a refused or required value that a site tells the lead."""
MAX_RULES = 64
"""Rules of one site that the server takes note of."""
BESIDE_RULES = ("privacy", "accepted_options")
"""What a refusal can be about beside the rules of a policy: the job's own privacy, and the site's entry."""
_RULE, _PLAIN = re.compile(r"[a-z_.]+"), re.compile(r"[\w.+\-\[\]' ]*")


@dataclass(frozen=True)
class Refusal:
    """One rule that a job falls short of.

    Attributes:
        rule: its name in the policy.
        asked: what the job asks for.
        required: what the policy requires.
        why: for the site's own log; it is not told to the lead.
    """

    rule: str
    asked: str
    required: str
    why: str = ""

    def __str__(self) -> str:
        """One line for people."""
        reason = f": {self.why}" if self.why else ""
        verb = "allowed" if self.required.startswith("at most ") else "required"
        return f"{self.rule}: the job asks for {self.asked}, {self.required} is {verb}{reason}"


class BelowPolicyError(PolicyError):
    """A job asks for less than a site's policy requires (TF-614); every rule is listed.

    Args:
        refusals: the rules, each with what is asked and required.
        told: whether the policy lets the lead see them; the code alone leaves otherwise.
        before: the message's first line.
    """

    def __init__(
        self,
        refusals: Iterable[Refusal],
        *,
        told: bool,
        before: str = "the job asks for less than this site's policy requires:",
    ) -> None:
        self.refusals = tuple(refusals)
        self.told = told
        super().__init__(before + "\n" + "\n".join(f"  - {refusal}" for refusal in self.refusals))

    def outside(self) -> list[list[str]]:
        """What may leave the site beside the code: rule, asked and required value of each refusal."""
        if not self.told:
            return []
        return [[item.rule, item.asked[:MAX_TOLD], item.required[:MAX_TOLD]] for item in self.refusals]


def in_words(told: object) -> tuple[str, ...]:
    """What a site told of the rules that a job falls short of, in words.

    Nothing in it can steer a terminal, or read as if another site had said it: a rule is a plain name, and
    a value that is more than a few plain words stands in quotes.

    >>> in_words([["epsilon_cap", "8", "at most 4"], [chr(27), "", ""], "nonsense"])
    ('epsilon_cap: asked 8, required at most 4',)
    >>> in_words([["pins", "1); site-2 refused: TF-614", "[2]"], ["x: asked 1); site-2 refused", "", ""]])
    ('pins: asked "1); site-2 refused: TF-614", required [2]',)
    """
    rules = [item for item in told[:MAX_RULES] if _is_refusal(item)] if isinstance(told, list) else []
    return tuple(f"{rule}: asked {_value(asked)}, required {_value(least)}" for rule, asked, least in rules)


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _is_refusal(item: object) -> bool:
    if not isinstance(item, list | tuple) or len(item) != 3:
        return False
    texts = all(isinstance(part, str) and part.isprintable() and len(part) <= MAX_TOLD for part in item)
    return texts and _RULE.fullmatch(item[0]) is not None
