"""What an optimizer does while it trains, measured from its step hooks."""

from daypack.telemetry.monitor import Monitor, Reading, monitor

__all__ = ["Monitor", "Reading", "monitor"]
