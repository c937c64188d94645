"""The fault laboratory behind `edgefl check`: methods under seeded schedules of crashes, cuts and delays."""

from edgefl.experiment.check.schedule import Schedule, draw
from edgefl.experiment.check.suite import Finding, Laboratory, Report, Trial, check
from edgefl.experiment.check.trial import Verdict

__all__ = ["Finding", "Laboratory", "Report", "Schedule", "Trial", "Verdict", "check", "draw"]
