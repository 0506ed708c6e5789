"""Tags of templates."""
