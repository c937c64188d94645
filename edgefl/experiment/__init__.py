"""From an experiment file to a run folder: the file, the plan, the run, what it leaves behind."""
