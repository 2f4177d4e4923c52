"""What a model learns about single users: a soft prompt for each."""
