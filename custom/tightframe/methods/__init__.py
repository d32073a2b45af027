"""Methods: a plain list, and an entry point for those of other packages.

A third-party package offers a method by an entry point of the group ``tightframe.methods`` whose
object is a ``Method``; only the one that a job names is imported.
"""

from __future__ import annotations

from tightframe import registry
from tightframe.methods import (
    ccvr,
    combine,
    creff,
    ditto,
    fed3r,
    fedavg,
    fedavg_etf,
    fedaws,
    fedbabu,
    fedcgs,
    fedcurv,
    feddc,
    feddyn,
    fedetf,
    fedilc,
    fedmmd,
    fedmr,
    fedncm,
    fednh,
    fednova,
    fedopt,
    fedper,
    fedproc,
    fedproto,
    fedprox,
    fedrep,
    fedrod,
    fedrs,
    fedsgd,
    local_only,
    moon,
    scaffold,
)
from tightframe.phases import Method
from tightframe.registry import find

ENTRY_POINTS = registry.METHODS

METHODS: list[Method] = [
    fedavg.METHOD,
    fedmr.METHOD,
    fedetf.METHOD,
    fednh.METHOD,
    fedavg_etf.METHOD,
    fedilc.METHOD,
    fedsgd.METHOD,
    fedrod.METHOD,
    fedprox.METHOD,
    fednova.METHOD,
    fedopt.METHOD,
    scaffold.METHOD,
    moon.METHOD,
    ditto.METHOD,
    fedper.METHOD,
    fedrep.METHOD,
    fedbabu.METHOD,
    ccvr.METHOD,
    creff.METHOD,
    fedproto.METHOD,
    local_only.METHOD,
    fedrs.METHOD,
    feddyn.METHOD,
    feddc.METHOD,
    fedproc.METHOD,
    fedmmd.METHOD,
    fedaws.METHOD,
    fedcurv.METHOD,
    fed3r.METHOD,
    fedcgs.METHOD,
    fedncm.METHOD,
    combine.METHOD,
]


def get(name: str) -> Method:
    """Return the method that a job calls ``name``.

    Raises:
        JobError: if there is none, listing the known names, or if an entry point is no method.
    """
    return find(METHODS, name, group=ENTRY_POINTS, kind=Method, what="a method")


__all__ = ["METHODS", "get"]
