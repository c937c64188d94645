"""Workload assignment: from profiles, links and model costs to each node's share of the work."""
