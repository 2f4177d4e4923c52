"""Language models as judges, planners and reply writers; the best of n samples under each reward or judge."""
