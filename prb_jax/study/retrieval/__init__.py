"""Rankings of profiles: which of a user's posts matter for a question."""
