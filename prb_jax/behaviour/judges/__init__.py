"""Language models as judges, planners and writers of replies; the best of n samples under each reward or judge."""
