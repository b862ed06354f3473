"""Scenarios that every registered optimizer goes through. `specs` says what is expected of which optimizer."""
