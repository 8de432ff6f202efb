"""Routing replay: the objects at the routers, their counts and their checks."""
