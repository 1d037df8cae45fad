"""Spans of traced requests, in OpenTelemetry's form. No torch; of no cost where it is off."""
