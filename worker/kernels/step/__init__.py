"""Step state and drawing: rows read, written and sampled on the device."""
