"""The commands, a module for each kind. Each registers its own when it is imported."""
