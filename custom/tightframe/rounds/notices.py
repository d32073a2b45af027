"""Sentences that a run says when it is not what it looks like."""

UNCHANGED = "class sums after the last round stayed shut, so the model is as that round left it"

BANNER = (
    "SYNTHETIC TWIN: no silo was told where its records lie, so every one trains on generated stand-ins for "
    "{dataset}. "
    "They show that the software works; they say nothing about medicine or about a method. "
    "For real records, see docs/data.md."
)
