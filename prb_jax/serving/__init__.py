"""A reward model behind HTTP, in the request shapes of the clients that are in use."""
