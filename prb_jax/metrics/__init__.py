"""Numbers from scored rows: accuracy and ties, intervals, the summary. Nothing here knows models or files."""
