"""The lab: nodes in network namespaces of this machine, on links that are shaped for real."""
