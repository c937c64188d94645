"""Coroutines that many methods share."""
