"""Local training only: every peer trains on its own data and nothing is exchanged. The other reference."""

from __future__ import annotations

from edgefl.methods.reference.centralized import server as train_alone
from edgefl.nodes import Faults, Method

METHOD = Method(
    name="local-only",
    title="Training without any exchange",
    paper="Robbins and Monro 1951, https://doi.org/10.1214/aoms/1177729586",
    roles={"peer": train_alone},
    messages=(),
    ends_with=("peer",),
    needs="any",
    evaluates="each",
    tolerates=Faults(crashes=True, returns=True, partitions=True),
)
