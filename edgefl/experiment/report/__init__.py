"""Reports: HTML files that open anywhere, made from run folders alone.

`write_report(folder)` tells of one run, `write_comparison(folders, out)` sets several side by side.
"""

from edgefl.experiment.report.comparison import write_comparison
from edgefl.experiment.report.run import write_report

__all__ = ["write_comparison", "write_report"]
