"""Which of a user's posts matter for a question: rankings of profiles."""
