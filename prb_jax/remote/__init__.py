"""Clients of other machines' servers: endpoints that write texts, and servers that score."""
