"""Figures from scored rows: accuracy and ties, intervals, the summary. Independent of models and files."""
