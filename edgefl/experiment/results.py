"""Results of a run as data frames."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.errors import ConfigError
from edgefl.experiment.folder import RunFolder, told

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """One run's folder. The tables and their columns are those of edgefl.experiment.folder."""

    path: Path
    record: dict[str, Any]
    """run.json: status, reason, versions, machine, ..."""

    @property
    def summary(self) -> dict[str, Any]:
        """What the run came to; empty for one that did not end."""
        return self.record.get("summary") or {}

    @cached_property
    def curve(self) -> pd.DataFrame:
        return self.table("curve")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        return self.table("metrics")

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        return self.table("evaluations")

    @cached_property
    def nodes(self) -> pd.DataFrame:
        return self.table("nodes")

    def table(self, name: str) -> pd.DataFrame:
        """Any table of the folder: "traffic", "spans", "events", "partition", ...

        Raises ConfigError when pandas is not installed or the run has no such table.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("pandas", None, "data frames need it: pip install 'edgefl[report]'") from error
        path = self.path / f"{name}.csv"
        if not path.exists():
            raise ConfigError(
                "DIR", str(self.path), f"there is no {path.name}: the run is {self.record['status']}"
            )
        # Floats come back bit for bit by default from 3.1 on, where asking for it is deprecated.
        old = tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1)
        return pd.read_csv(path, **({"float_precision": "round_trip"} if old else {}))


def load(run_dir: str | Path) -> Run:
    """The results of a run. Raises ConfigError for a folder that is no run's."""
    folder = RunFolder.open(Path(run_dir))
    return Run(folder.path, told(folder.path, folder.record))
