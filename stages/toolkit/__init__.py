"""Tools that all stages share."""
